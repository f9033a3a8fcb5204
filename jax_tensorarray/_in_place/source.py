"""Rewrite the source of a module, as a syntax tree, such that functions which it jits go through `package`.

    step = jax.jit(f)
    # becomes
    step = __jax_tensorarray_jit__(jax.jit)(f)

Every line keeps its number.

There is no way without it. A decorator calls `jax.jit` while the module is imported, `from jax import jit` keeps the
function itself, and another `jit` in the module `jax` would be used by all packages. Python's `ast` also visits the
nodes that a later version adds. If a call cannot stand in such a node, `compile` raises an error, and the node needs a
method as `MatchValue` has.
"""

import ast

#: The name by which the module finds that function.
OURS = "__jax_tensorarray_jit__"


def replaced(source: bytes, path: str) -> ast.Module:
    """Return the source as a tree in which each `jit` that is read is given to `OURS`."""
    tree: ast.Module = _Replaced().visit(ast.parse(source, path))
    return ast.fix_missing_locations(tree)


class _Replaced(ast.NodeTransformer):
    """Put a call of `OURS` around each attribute `jit` that is read, and each `jit` that is imported. No line moves."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        return _call_of_ours(node) if node.attr == "jit" and isinstance(node.ctx, ast.Load) else node

    def visit_MatchValue(self, node: ast.MatchValue) -> ast.MatchValue:
        return node  # a call cannot stand there

    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.stmt]:
        names = [alias.asname or alias.name for alias in node.names if alias.name == "jit"]
        read, stored = ast.Load(), ast.Store()
        assigned = (ast.Assign([ast.Name(name, stored)], _call_of_ours(ast.Name(name, read))) for name in names)
        return [node, *(ast.copy_location(ast.fix_missing_locations(new), node) for new in assigned)]


def _call_of_ours(value: ast.expr) -> ast.expr:
    call = ast.Call(ast.Name(OURS, ast.Load()), [value], [])
    return ast.copy_location(call, value) if hasattr(value, "lineno") else call
