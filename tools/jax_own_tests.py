"""Run JAX's own tests without this library and with it, and name those that differ.

    git clone --depth 1 --branch jax-v0.10.2 https://github.com/jax-ml/jax /tmp/jax
    python tools/jax_own_tests.py /tmp/jax/tests/pjit_test.py                            # the library is used
    python tools/jax_own_tests.py --imported /tmp/jax/tests/pjit_test.py                 # it is only imported
    python tools/jax_own_tests.py --our-loops /tmp/jax/tests/lax_control_flow_test.py    # and its loops are tested
    python tools/jax_own_tests.py --in-place /tmp/jax/tests/lax_control_flow_test.py     # and `in_place` is

What the library replaces in JAX is replaced by its first use. So a use comes first, unless it is `--imported` only.
The tests should belong to the installed jax. Some tests of another version fail in both runs, which says nothing. With
`--our-loops` the second run has a copy of the file in which `lax.scan`, `lax.while_loop` and `lax.fori_loop` are ours,
and JAX itself is as it is. With `--in-place` every function that a test gives to `jax.jit` is under `in_place`, which
takes buffers of any size. The exit code is 1 if a test differs that need not.
"""

import re
import sys
import tempfile
from pathlib import Path

from outcomes import WHOLE, outcomes

ROOT = Path(__file__).parents[1]

#: The tests that have to differ. With our loops: they look for `while` in a jaxpr, and for JAX's text of the error in
#: reverse mode. Under `in_place`: they look for an equation in the jaxpr, which is in a call there, or another one.
EXPECTED = {
    "": (),
    "--imported": (),
    "--our-loops": ("testForiLoopBatchedIssue1190", "testWhileGradError"),
    "--in-place": ("test_gather_with_vjp31", "test_optimization_barrier_with_refs", "test_slicing_with_vjp3"),
}

#: What the second run does before the tests are imported.
SETUP = "import jax_tensorarray; jax_tensorarray._compat.first_use()"
SETUP_IMPORTED = "import jax_tensorarray"
#: `test_util` is private, and there is no way around it: its checks compile by the `jit` of its own `api`. The tests
#: that are run import it by the same name.
SETUP_IN_PLACE = """
import functools, sys, types, jax, jax_tensorarray
from jax._src import test_util
jit = jax.jit
@functools.wraps(jit)
def jit_in_place(fun=None, **options):
    if fun is None:
        return functools.partial(jit_in_place, **options)
    caller = sys._getframe(1).f_globals["__name__"]
    is_test = caller == test_util.__name__ or not caller.startswith("jax")
    return jit(jax_tensorarray.in_place(fun) if is_test and callable(fun) else fun, **options)
jax.jit = jit_in_place
test_util.api = types.SimpleNamespace(**vars(test_util.api) | {"jit": jit_in_place})
"""


def with_our_loops(source: str) -> str:
    """Return the source of a test file, line by line the same, but with calls of our loops."""
    source = re.sub(r"""(?<![\w."'])(jax\.)?lax\.(scan|while_loop|fori_loop)\b""", r"_ours.\2", source)
    return re.sub(r"^import jax$", "import jax; import jax_tensorarray as _ours", source, count=1, flags=re.MULTILINE)


def _by_name(outcomes: dict[str, str]) -> dict[str, str]:
    """Leave out the path of the file, which differs with `--our-loops`."""
    return {test.partition("::")[2] or test: outcome for test, outcome in outcomes.items()}


def main(arguments: list[str]) -> int:
    """Compare the two runs of each file. Return 1 if a test differs that need not, else 0."""
    mode = next((x for x in arguments if x.startswith("--")), "")
    if mode not in EXPECTED:
        sys.exit(__doc__)
    logs, is_any = Path(tempfile.mkdtemp(prefix="jax_own_tests_")), False
    python_path: list[str | Path] = [ROOT, *sys.path[1:]]
    for path in [Path(x).resolve() for x in arguments if x != mode]:
        without = outcomes([path], "", logs / f"{path.stem}_without.log", rootdir=path.parents[1], path=python_path)
        tested = path
        if mode == "--our-loops":
            tested = logs / "tests" / path.name
            tested.parent.mkdir(exist_ok=True)
            tested.write_text(with_our_loops(path.read_text()))
        setup = {"--in-place": SETUP_IN_PLACE, "--imported": SETUP_IMPORTED}.get(mode, SETUP)
        with_library = outcomes(
            [tested], setup, logs / f"{path.stem}_with.log", rootdir=tested.parents[1], path=python_path
        )
        without, with_library = _by_name(without), _by_name(with_library)
        differ = sorted(test for test in without | with_library if without.get(test) != with_library.get(test))
        failed = sum(outcome == "failed" for outcome in without.values())
        count = len(without.keys() - {WHOLE})
        print(f"{path}: {count} tests, {failed} fail without the library; {len(differ)} differ")
        for test in differ:
            note = " (expected)" if test.split("::")[-1].startswith(EXPECTED[mode]) else ""
            print(f"  {test}: {without.get(test)} without it, {with_library.get(test)} with it{note}", flush=True)
            is_any |= not note
    print(f"logs: {logs}")
    return int(is_any)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
