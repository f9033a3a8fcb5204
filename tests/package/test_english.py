"""What users read has none of the habits that `tools/english.py` looks for."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if not (ROOT / "tools").exists():
    pytest.skip("needs the tools and the pages of the sources", allow_module_level=True)

sys.path.insert(0, str(ROOT / "tools"))

import english  # noqa: E402

WORDS = " ".join(["word"] * 40)


@pytest.mark.parametrize(
    ("text", "habit"),
    [
        ("What reads rows does so in order.", "begins with What"),
        ("Rows move.\n**What** JAX keeps is large.", "begins with What"),
        ("Whoever reads this is right.", "begins with Whoever"),
        ("Rows move. Of these some are kept.", "begins with Of"),
        ("Use slices in\nplace of calls.", "in place of (instead of)"),
        ("It copies 250 KiB a step.", "a step (per step)"),
        ("This takes 0.4 microseconds a\nstep.", "a step (per step)"),
        ("It is copied twice a call.", "a step (per step)"),
        (f"The {WORDS}.", "more than 40 words"),
    ],
)
def test_a_habit_is_found(text, habit):
    assert [found for _, found, _ in english.habits_in(text)] == [habit]


@pytest.mark.parametrize(
    "text",
    [
        "What does it cost?",
        "## What it costs",
        "Rows are updated in place, instead of copied.",
        "This is done in every step, each time a row is read.",
        "A step of 4 rows, a call.",
        f"{WORDS}.",
        f"{WORDS[5:]} - `{WORDS}`.",
        f"{WORDS}. Then `{WORDS}` [code and links](https://example.invalid/What) are a word each.",
    ],
)
def test_other_sentences_have_none(text):
    assert not list(english.habits_in(text))


def test_code_and_generated_tables_are_not_read_and_lines_are_counted():
    page = """# What it is

```sh
What is code
```

<!-- python -m benchmarks: begin -->
| What | is generated |
<!-- end -->

- an item
  of two lines. What
  follows is found
- | not a cell |

| a | What is a cell |
|---|---|
"""
    assert [(line, text) for line, text in english.blocks(page) if "What" in text] == [
        (1, "# What it is"),
        (11, "an item\n  of two lines. What\n  follows is found"),
        (16, "What is a cell"),
    ]
    assert list(english.habits_in(english.blocks.__doc__ or "")) == []
    ((line, _, sentence),) = english.habits_in("an item\n  of two lines. What\n  follows is found")
    assert (line, sentence) == (1, "What follows is found")


def test_public_docstrings_are_found_without_an_import():
    files = {text.file.relative_to(ROOT).as_posix() for text in english.in_docstrings()}
    assert {
        "jax_tensorarray/_array/tensorarray.py",
        "jax_tensorarray/_in_place/api.py",
        "jax_tensorarray/_loops/api.py",
        "jax_tensorarray/_ops/write.py",
        "jax_tensorarray/doctor/_growth.py",
        "jax_tensorarray/tf/_loops.py",
    } <= files
    assert any(text.text.startswith("Write") for text in english.in_docstrings())


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("kind", english.SOURCES)
def test_no_text_that_users_read_has_a_habit(kind):
    found = list(english.findings(english.SOURCES[kind]()))
    assert not found, "\n".join(f"{f.file}:{f.line}: {f.habit}: {f.sentence}" for f in found)
