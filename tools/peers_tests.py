"""Run the tests of public libraries with everything that they jit, batch, differentiate and loop under `in_place`.

    python tools/peers_tests.py mctx optax                  # source distributions from the package index
    python tools/peers_tests.py equinox=/tmp/equinox        # a clone, for those whose distributions have no tests
    python tools/peers_tests.py jax=/tmp/jax --files tests/ode_test.py tests/nn_test.py
    python tools/peers_tests.py optax --files 'optax/transforms/*_test.py' -k accumulate --ways jit

Each file of tests is run plain, with every `jax.jit` under `in_place` ("jit"), and with transformations and loops under
it too ("all"). In the last two, each call is compared with the plain one: `in_place_calls.py` says how. A test that
fails there, and neither plain nor without the comparison, fails by the comparison and is not counted. Nor is one that
fails with everything under `jax.jit` too.

The libraries are installed into `build/peers/venv`, with the jax of the environment that runs this, or into the
environment of `--python`. The exit code is 1 if anything differs that is not in EXPECTED.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from outcomes import SLOW, WHOLE, outcomes

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "peers"

#: Of these runs, one after the other: the name of the run, and whether calls are compared.
WAYS = ("jit", "all")


class Peer(NamedTuple):
    """A library: its name on the package index, its files of tests, and what these need besides."""

    package: str
    files: tuple[str, ...]
    needs: tuple[str, ...] = ()
    #: Tests to leave out, for `-k`.
    without: str = ""


#: jaxtyping 0.3.11 cannot read the types of a newer one, and no library that needs it can be imported.
OLDER_NUMPY = ("numpy<2.5",)

PEERS = {
    "jax": Peer("jax", ("tests/ode_test.py",), ("absl-py", "hypothesis")),
    "equinox": Peer("equinox", ("tests/test_*.py",), ("beartype", *OLDER_NUMPY)),
    "diffrax": Peer("diffrax", ("test/test_*.py",), ("beartype", "optax", "scipy", *OLDER_NUMPY)),
    "optimistix": Peer("optimistix", ("tests/test_*.py",), ("beartype", "optax", *OLDER_NUMPY)),
    "lineax": Peer("lineax", ("tests/test_*.py",), ("beartype", *OLDER_NUMPY)),
    "optax": Peer("optax", ("optax/*/*_test.py", "optax/*/*/*_test.py"), ("absl-py", "flax")),
    "flax": Peer("flax", ("tests/linen/*_test.py", "tests/nnx/*_test.py", "tests/core/*_test.py"), ("absl-py",)),
    "haiku": Peer("dm-haiku", ("haiku/_src/*_test.py",), ("absl-py", "dm-tree", "dill")),
    "numpyro": Peer("numpyro", ("test/infer/test_*.py", "test/test_*.py", "test/ops/test_*.py")),
    "blackjax": Peer("blackjax", ("tests/*/test_*.py", "tests/*/*/test_*.py"), ("chex",)),
    "distrax": Peer("distrax", ("distrax/_src/*/*_test.py",), ("absl-py", "mock")),
    "mjx": Peer("mujoco-mjx", ("mujoco/mjx/_src/*_test.py",), ("absl-py",)),
    "jaxopt": Peer("jaxopt", ("tests/*_test.py",), ("absl-py", "scikit-learn")),
    "mctx": Peer("mctx", ("mctx/_src/tests/*_test.py",), ("absl-py",)),
    "rlax": Peer("rlax", ("rlax/_src/*_test.py",), ("absl-py",)),
    "dynamax": Peer("dynamax", ("dynamax/*/*_test.py", "dynamax/*_test.py")),
    # Of a clone, its `substrates/meta/rewrite.py FILE --numpy_to_jax` makes the tests of what is installed.
    "tfp": Peer("tfp-nightly", ("mcmc/*_test.py",), ("absl-py", "scipy", "mock")),
    "ott": Peer("ott-jax", ("tests/*/*_test.py", "tests/*/*/*_test.py")),
}


class Expected(NamedTuple):
    """What has to differ: a pattern of `peer test kind detail`, and the reason."""

    pattern: str
    reason: str


EXPECTED: tuple[Expected, ...] = (
    Expected("^jax .*_cache_hit outcome", "it counts how often a function is traced: more often here"),
    Expected("^jax .*GatherGradBatchedIndices.* values", "the program promises an index in bounds, and it is not"),
    Expected("^numpyro test/test_compile.py.* outcome", "it counts how often a function is traced: less often here"),
    Expected("^jaxopt .*::test_n_calls.* outcome", "it counts calls in Python, and `in_place` compiles"),
)


class Difference(NamedTuple):
    """What differs in a test: its outcome, or a call that it makes."""

    test: str
    what: str

    def reason(self, peer: str) -> str:
        """Return why it is expected, or an empty string."""
        text = f"{peer} {self.test} {self.what}"
        return next((expected.reason for expected in EXPECTED if re.search(expected.pattern, text, re.DOTALL)), "")


# --- installed ----------------------------------------------------------------------------------------------------


def environment(python: str | None) -> str:
    """Return a Python that has this library; unless there is one, make it."""
    if python is not None:
        return python
    venv = WORK / "venv"
    if not (venv / "bin" / "python").exists():
        import jax

        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "-q"]
        settings = os.environ | {"JAX_TENSORARRAY_CUDA": "OFF"}
        subprocess.run([*pip, f"jax=={jax.__version__}", "pytest", str(ROOT)], check=True, env=settings)
    return str(venv / "bin" / "python")


def source_of(name: str, clone: str, python: str) -> Path:
    """Return a folder with the library and its tests. What it needs is installed."""
    peer = PEERS[name]
    pip = [python, "-m", "pip", "install", "-q"]
    wanted = [*peer.needs, *([] if name == "jax" else [peer.package])]
    # The jax that is there stays.
    jax = subprocess.run(
        [python, "-c", "import jax; print(jax.__version__)"], check=True, capture_output=True, text=True
    )
    subprocess.run([*pip, f"jax=={jax.stdout.strip()}", *wanted], check=True)
    if clone:
        return Path(clone).resolve()
    where = WORK / "source" / name
    if not (where / "unpacked").exists():
        where.mkdir(parents=True, exist_ok=True)
        download = [python, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", peer.package, peer.package]
        subprocess.run([*download, "-d", where], check=True)
        with tarfile.open(next(where.glob("*.tar.gz"))) as archive:
            archive.extractall(where / "unpacked", filter="data")
    return next((where / "unpacked").iterdir())


# --- run ----------------------------------------------------------------------------------------------------------


class Options(NamedTuple):
    """What the user has asked for."""

    python: str
    ways: Sequence[str]
    select: str
    seconds: int
    seconds_of_test: int
    every: int
    plain_last: bool
    logs: Path


def compared(
    name: str, source: Path, files: Sequence[Path], options: Options
) -> Iterator[tuple[str, str, list[Difference]]]:
    """Yield (way, summary, differences) of files of tests that run in one process."""
    label = f"{name}_{files[0].stem}" + ("_etc" if len(files) > 1 else "")
    select = [options.select, f"not ({PEERS[name].without})"] if PEERS[name].without else [options.select]
    selected = " and ".join(f"({part})" for part in select if part)

    def run(way: str, setup: str, tests: Sequence[str | Path] = files) -> dict[str, str]:
        return outcomes(
            tests,
            setup,
            options.logs / f"{label}_{way}.log",
            rootdir=source,
            options=["-k", selected] if selected and tests is files else [],
            python=options.python,
            # For a clone it is the clone that is tested, not what is installed for the sake of what it needs.
            path=[ROOT, ROOT / "tools", *([] if name == "jax" else [source, source / "src"])],
            seconds=options.seconds,
            seconds_of_test=options.seconds_of_test,
            every=options.every if tests is files else 1,
        )

    plain: dict[str, str] = {}
    if not options.plain_last:
        plain = run("plain", "")
        yield "plain", _summary(plain, {}), []
    for way in options.ways:
        output = options.logs / f"{label}_{way}.jsonl"
        install = f"import in_place_calls; collected = in_place_calls.collected; in_place_calls.install({way!r}"
        found = run(way, f"{install}, {str(output)!r})")
        if options.plain_last:
            failed = [test for test, outcome in found.items() if outcome in ("failed", "started") and test != WHOLE]
            plain = found | (run("plain", "", failed) if failed else {})
        differ = _differ(plain, found)
        if differ:  # are they by the comparison?
            whole = len(differ) > 40 or any("::" not in test for test in differ)
            again = files if whole else differ
            alone = run(f"{way}_again", f"{install}, compares=False)", again)
            differ = [test for test in differ if plain.get(test) != alone.get(test)]
            if differ and way == "all":  # are they by jit, in so many places?
                jitted = run(f"{way}_jitted", f"{install}, compares=False, state='jit')", again)
                differ = [test for test in differ if alone.get(test) != jitted.get(test)]
        lines = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
        calls: dict[str, int] = next((line[1] for line in reversed(lines) if line[0] == "calls"), {})
        differences = [Difference(test, f"outcome: {plain.get(test)}, {found.get(test)}") for test in differ]
        for _, test, how, function, kind, detail in (line for line in lines if line[0] == "differs"):
            differences.append(Difference(test, f"{how} of {function}: {kind}, {detail}"))
        yield way, _summary(found, calls), differences


def _differ(plain: dict[str, str], found: dict[str, str]) -> list[str]:
    """Return the tests whose outcomes differ, but for those that the clock has ended."""

    def of(outcomes: dict[str, str], test: str) -> str:
        is_slow = outcomes.get(WHOLE) == SLOW and outcomes.get(test, "started") == "started"
        return SLOW if is_slow else outcomes.get(test, "absent")

    both = {test: (of(plain, test), of(found, test)) for test in plain | found if test != WHOLE}
    return sorted(test for test, (x, y) in both.items() if x != y and SLOW not in (x, y))


def _summary(found: dict[str, str], calls: dict[str, int]) -> str:
    counts = Counter(outcome for test, outcome in found.items() if test != WHOLE)
    end = {"passed": "", SLOW: ", ended by the clock"}.get(found.get(WHOLE, ""), ", DIED")
    words = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))
    said = "; calls: " + ", ".join(f"{n} {what}" for what, n in sorted(calls.items())) if calls else ""
    return f"{words or 'no tests'}{end}{said}"


def main(arguments: Sequence[str]) -> int:
    """Run the tests of each library. Return 1 if anything differs that is not expected, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="+", help=f"NAME or NAME=CLONE, of {', '.join(PEERS)}")
    parser.add_argument("--files", nargs="+", help="files of tests, or patterns, in the source of the library")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="tests to run, as for pytest")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="run only each N-th test")
    parser.add_argument(
        "--plain-last", action="store_true", help="run plain only what fails otherwise, which is faster"
    )
    parser.add_argument("--python", help="of an environment with this library, into which peers are installed")
    parser.add_argument("--no-install", action="store_true", help="everything is there")
    parser.add_argument(
        "--together", action="store_true", help="run all files of a library in one process, which is faster"
    )
    parser.add_argument("--seconds", type=int, default=1800, help="for one run of one file, or of all together")
    parser.add_argument("--seconds-of-test", type=int, default=120, help="for one test")
    given = parser.parse_args(arguments)
    WORK.mkdir(parents=True, exist_ok=True)
    logs = Path(tempfile.mkdtemp(prefix="logs-", dir=WORK))
    python = environment(given.python)
    options = Options(
        python, given.ways, given.k, given.seconds, given.seconds_of_test, given.every, given.plain_last, logs
    )
    unexpected = 0
    for name, _, clone in (peer.partition("=") for peer in given.peers):
        if name not in PEERS:
            parser.error(f"{name} is not one of {', '.join(PEERS)}")
        source = Path(clone).resolve() if clone and given.no_install else source_of(name, clone, python)
        patterns = given.files or PEERS[name].files
        files = sorted({file for pattern in patterns for file in source.glob(pattern)})
        if not files:
            sys.exit(f"{name}: no tests in {source}: name a clone, as {name}=DIRECTORY, or other --files")
        print(f"{name}: {len(files)} files of tests in {source}", flush=True)
        for group in [files] if given.together else [[file] for file in files]:
            for way, summary, differences in compared(name, source, group, options):
                print(f"  {group[0].relative_to(source)}{' ...' * (len(group) > 1)}, {way}: {summary}", flush=True)
                for difference in differences:
                    reason = difference.reason(name)
                    unexpected += not reason
                    note = f" (expected: {reason})" if reason else ""
                    print(f"    {difference.test}: {difference.what}{note}", flush=True)
    print(f"{unexpected} unexpected differences; logs: {logs}")
    return int(unexpected > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
