"""Find the habits that make a page hard to read. None is allowed.

    python tools/english.py             # file:line, the habit, the sentence; the exit code is 1 if there is any
    python tools/english.py --count     # a table: how many of each habit, in each kind of text

The tool reads the pages without their code and generated tables, the docstrings of the public API, the texts of the
doctor, and the forms for issues and pull requests. It imports nothing of the package.
"""

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "docs/**/*.md")

#: The modules that users import. Those without `__all__` count with every name that has no underscore.
MODULES = (
    "jax_tensorarray",
    "jax_tensorarray.checkpoint_policies",
    "jax_tensorarray.doctor",
    "jax_tensorarray.export",
    "jax_tensorarray.flax",
    "jax_tensorarray.primitives",
    "jax_tensorarray.pytest_plugin",
    "jax_tensorarray.residuals",
    "jax_tensorarray.template",
    "jax_tensorarray.tf",
    "jax_tensorarray.tf.nest",
)

ADVICE = ("jax_tensorarray/doctor/_advice.py", "jax_tensorarray/doctor/_reasons.py")

FORMS = (".github/ISSUE_TEMPLATE/*.yml", ".github/*.md")

MOST_WORDS = 40

# "250 KiB a step", "microseconds a call", "once a row"; but neither "each time a row is read" nor "a step".
_MEASURE = r"[KMG]i?B|kB|B|[num\u00b5]?s|%|bytes?|(?:nano|micro|milli)?seconds?|times|copy|copies|operations?"
_WORD = r"(?:nano|micro|milli)?seconds|bytes|[Oo]nce|[Tt]wice|[Oo]ne|[Tt]wo|[Tt]hree|longer|[Tt]imes"
_AMOUNT = rf"(?:\d[\d.,^()]* ?(?:{_MEASURE})?|{_WORD}|(?<!each )(?<!every )[Tt]ime)"
_NOUN = r"(?:step|call|row|run|iteration|trace|element|example|program|loop|op|token|equation)"
_VERB = r"(?:is|was|has|can|may|must|needs|takes|reads|writes)"

_PATTERNS = {
    "begins with What": r"^What\b(?!.*\?$)",  # a question may
    "begins with Whoever": r"^Whoever\b",
    "begins with Of": r"^Of\b",
    "in place of (instead of)": r"\b[Ii]n place of\b",
    "a step (per step)": rf"(?<![\w.]){_AMOUNT} an? {_NOUN}\b(?! {_VERB}\b)",
}

#: What a sentence may not be, by the name of the habit.
HABITS: dict[str, Callable[[str], object]] = {
    **{habit: re.compile(pattern).search for habit, pattern in _PATTERNS.items()},
    f"more than {MOST_WORDS} words": lambda sentence: words_in(sentence) > MOST_WORDS,
}


class Text(NamedTuple):
    """A paragraph, a heading, an item of a list, or a cell of a table."""

    file: Path
    line: int
    text: str


class Finding(NamedTuple):
    """A sentence with a habit."""

    file: Path
    line: int
    habit: str
    sentence: str


# --- sentences ---------------------------------------------------------------------------------------------------

# Code, and where a link goes. Their words and full stops are none of the sentence's.
_NO_WORDS = re.compile(r"(`+)(?:.+?)\1|(?<=\])\([^)\s]*\)", re.DOTALL)
_END = re.compile(r"""(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!\bcf\.)(?<!\bvs\.)["')*_]*\s+(?=["'(\[*_`]*[A-Z`\d])""")


def sentences(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the sentences of Markdown: how many lines come before, the sentence, and the same with code as one word."""
    masked = _NO_WORDS.sub(lambda m: re.sub("[^`]", "x", m[0]), text)
    start = 0
    for end in [*(m.end() for m in _END.finditer(masked)), len(text)]:
        start += len(text[start:end]) - len(text[start:end].lstrip())
        sentence, words = (" ".join(t[start:end].split()) for t in (text, masked))
        if sentence:
            yield text.count("\n", 0, start), sentence, words
        start = end


def words_in(sentence: str) -> int:
    """Return how many words a sentence has. A dash between spaces is none."""
    return sum(any(c.isalnum() for c in word) for word in sentence.split())


def habits_in(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield each habit of each sentence: how many lines come before, the habit, and the sentence."""
    for line, sentence, words in sentences(text):
        for habit, is_found in HABITS.items():
            if is_found(words.strip("*_>\"'([ ")):
                yield line, habit, sentence


# --- pages -------------------------------------------------------------------------------------------------------

_FENCE = re.compile(r"^( *)(`{3,}|~{3,}).*?^ *\2`*~*[ ]*$", re.MULTILINE | re.DOTALL)
# What a program writes is between two comments, of which the second says so.
_GENERATED = re.compile(r"<!--(?:(?!-->).)*-->(?:(?!<!--).)*<!-- end.*?-->", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_BEGINS_A_BLOCK = re.compile(r"^\s*(?:[-*+] |\d+[.)] |#+ |\||> |!!! |\?\?\? |:::|\[\^?[^\]]+\]: )")
_MARK = re.compile(r"^\s*(?:[-*+] +(?:\[[ x]\] )?|\d+[.)] +|#+ +|> +|(?:!!!|\?\?\?)\+? \w+ ?)")


def without(pattern: re.Pattern[str], text: str) -> str:
    """Return a text with the matches made empty, on as many lines as before."""
    return pattern.sub(lambda m: "\n" * m[0].count("\n"), text)


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yield each paragraph, heading, item and cell of Markdown without code, with the number of its first line."""
    for pattern in (_FENCE, _GENERATED, _COMMENT):
        text = without(pattern, text)
    first, lines = 0, list[str]()
    for number, line in enumerate([*text.split("\n"), ""], 1):
        if lines and (not line.strip() or _BEGINS_A_BLOCK.match(line)):
            yield first, "\n".join(lines)
            lines = []
        if line.lstrip().startswith("|"):
            yield from ((number, cell.strip()) for cell in re.split(r"(?<!\\)\|", line) if re.search(r"\w", cell))
        elif line.lstrip().startswith("#"):
            yield number, line.strip()  # with its mark: a heading is no sentence, and may begin with What
        elif line.strip() and not line.lstrip().startswith(":::"):
            first = first if lines else number
            lines.append(line if lines else _MARK.sub("", line))


def in_pages() -> Iterator[Text]:
    """Yield the texts of the pages."""
    for file in files(PAGES):
        yield from (Text(file, line, text) for line, text in blocks(file.read_text()))


def files(patterns: Iterable[str]) -> Iterator[Path]:
    """Yield the files that patterns name, in order."""
    for pattern in patterns:
        yield from sorted(ROOT.glob(pattern))


# --- docstrings --------------------------------------------------------------------------------------------------

_DOCTEST = re.compile(r"^ *>>> .*\n?(?:.*\S.*\n?)*", re.MULTILINE)
_SECTION = re.compile(r"^ *(?:Args|Returns|Raises|Yields|Attributes|Example|Examples|Note):$", re.MULTILINE)
_ARGUMENT = re.compile(r"^ +\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*: ", re.MULTILINE)

Documented = ast.Module | ast.ClassDef | ast.FunctionDef


def source_of(module: str) -> Path | None:
    """Return the file of a module of the package."""
    path = ROOT / module.replace(".", "/")
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.exists()), None)


def definition(module: str, name: str) -> tuple[Path, Documented] | None:
    """Follow imports to the function or class that a module calls `name`."""
    file = source_of(module)
    if file is None:
        return None
    tree = ast.parse(file.read_text())
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name]
    if found:
        return file, found[-1]  # the others are overloads
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (origin := node.module or "").startswith("jax_tensorarray"):
            for alias in node.names:
                is_module = source_of(f"{origin}.{alias.name}") is not None
                if (alias.asname or alias.name) == name and not is_module:
                    return definition(origin, alias.name)
    return None


def public_names(tree: ast.Module) -> list[str]:
    """Return what `__all__` lists, or the names without an underscore that a module defines."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and not n.name.startswith("_")]


def documented(file: Path, node: Documented) -> Iterator[tuple[Path, Documented]]:
    """Yield a function, or a class with its public methods and those of its bases in the package."""
    yield file, node
    if isinstance(node, ast.ClassDef):
        for member in node.body:
            if isinstance(member, ast.FunctionDef | ast.ClassDef) and not member.name.startswith("_"):
                yield from documented(file, member)
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for base in node.bases:
            if isinstance(base, ast.Name) and (found := definition(module.removesuffix(".__init__"), base.id)):
                yield from documented(*found)


def in_docstrings() -> Iterator[Text]:
    """Yield the texts of the docstrings of the public API."""
    seen = set[tuple[Path, int]]()
    for module in MODULES:
        file = source_of(module)
        assert file is not None, f"{module} is gone: take it off MODULES in {__file__}"
        tree = ast.parse(file.read_text())
        found: list[tuple[Path, Documented]] = [(file, tree)]
        for name in public_names(tree):
            if defined := definition(module, name):
                found += documented(*defined)
        for path, node in found:
            if ast.get_docstring(node) is None:
                continue
            statement = node.body[0]
            assert isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if (path, statement.lineno) not in seen:
                seen.add((path, statement.lineno))
                yield from in_docstring(path, statement.lineno, str(statement.value.value))


def in_docstring(file: Path, line: int, docstring: str) -> Iterator[Text]:
    """Yield the texts of a docstring, without its examples."""
    docstring = without(_SECTION, without(_DOCTEST, docstring))
    # The name of an argument is not a part of the sentence about it, and each is a paragraph.
    docstring = _ARGUMENT.sub("- ", docstring)
    yield from (Text(file, line + number - 1, text) for number, text in blocks(docstring))


# --- other texts -------------------------------------------------------------------------------------------------


def in_advice() -> Iterator[Text]:
    """Yield the texts of the doctor: all strings that are sentences, but for docstrings."""
    for file in files(ADVICE):
        tree = ast.parse(file.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
            if is_text and isinstance(node, ast.Constant) and str(node.value).count(" ") > 2:
                yield Text(file, node.lineno, str(node.value))


def in_forms() -> Iterator[Text]:
    """Yield the texts of the forms: the values of YAML, and the comments of Markdown."""
    for file in files(FORMS):
        text = re.sub(r"^[- ]*[a-z_]+: *(?:[|>]-?)?\"?", "- ", file.read_text(), flags=re.MULTILINE)
        text = text.replace("<!--", "").replace("-->", "")
        yield from (Text(file, line, block) for line, block in blocks(text))


SOURCES = {"pages": in_pages, "docstrings": in_docstrings, "advice": in_advice, "forms": in_forms}


def findings(texts: Iterable[Text]) -> Iterator[Finding]:
    """Yield the sentences that have a habit, once for each habit."""
    for file, first, text in texts:
        yield from (Finding(file, first + line, habit, sentence) for line, habit, sentence in habits_in(text))


def table() -> Iterator[str]:
    """Yield the lines of a table in Markdown: how many of each habit, in each kind of text."""
    found = {kind: Counter(f.habit for f in findings(source())) for kind, source in SOURCES.items()}
    yield f"| habit | {' | '.join(SOURCES)} |"
    yield "|---|" + "--:|" * len(SOURCES)
    for habit in HABITS:
        yield f"| {habit} | {' | '.join(str(found[kind][habit]) for kind in SOURCES)} |"
    counts = (sum(1 for text in source() for _ in sentences(text.text)) for source in SOURCES.values())
    yield f"| sentences, headings and cells | {' | '.join(map(str, counts))} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Print what there is, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", action="store_true", help="print a table of counts instead of sentences")
    if parser.parse_args(argv).count:
        print(*table(), sep="\n")
        return 0
    found = [finding for source in SOURCES.values() for finding in findings(source())]
    for file, line, habit, sentence in found:
        print(f"{file.relative_to(ROOT)}:{line}: {habit}: {sentence}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
