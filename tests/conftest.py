"""The suite runs in 64 bits, so that derivatives can be compared with finite differences, and on eight CPU devices."""

import gc
import importlib.util
import itertools
import os
import sys
import tempfile
import zlib
from collections import defaultdict
from pathlib import Path

import hypothesis
import jax
import pytest
from hypothesis import HealthCheck

# Machine code runs once in a test, and most of the time would go to making it: XLA makes it with less effort here, and
# in the processes that tests start. With `XLA_FLAGS=` it is what users have, as it is for the main job.
LITTLE_EFFORT = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
OTHER_FUSIONS = "--xla_cpu_use_fusion_emitters=false"  # less effort too; loops have other fusions, and no other copies
if "TENSORARRAY_NEEDS_GPU" not in os.environ:
    flags = [LITTLE_EFFORT, OTHER_FUSIONS] if jax.__version_info__ < (0, 11) else [LITTLE_EFFORT]
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))

#: Says which version it is, and writes an empty file.
NO_ASSEMBLER = """#!/bin/sh
[ "$1" = --version ] && echo "ptxas: NVIDIA (R) Ptx optimizing assembler, release 13.0, V13.0.48" && exit
while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done
"""

# The helpers of the tests are plain modules in `support`, importable however pytest is started.
sys.path.insert(0, str(Path(__file__).parent / "support"))

# Programs that are kept are many objects, and none of them is garbage.
gc.set_threshold(50_000, 20, 20)

jax.config.update("jax_enable_x64", True)

# What is divided among devices is tested on eight; everything else uses the first.
jax.config.update("jax_num_cpu_devices", 8)

# Random programs and the like: a few, the same every time; more with `--slow`, and more again with `--all`; others with
# HYPOTHESIS_PROFILE=night.
hypothesis.settings.register_profile(
    "few", deadline=None, derandomize=True, database=None, max_examples=5, suppress_health_check=list(HealthCheck)
)
few = hypothesis.settings.get_profile("few")
hypothesis.settings.register_profile("some", parent=few, max_examples=10)
hypothesis.settings.register_profile("many", parent=few, max_examples=25)
hypothesis.settings.register_profile("night", parent=few, derandomize=False, max_examples=10_000, print_blob=True)


def part_of(text):
    number, count = map(int, text.split("/"))
    return number % count, count


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run slow tests too, and more random programs")
    parser.addoption(
        "--slow",
        metavar="K/N",
        type=part_of,
        help="run part K of N of the slow tests too, and more random programs; K may be any number",
    )


def pytest_report_header():
    if importlib.util.find_spec("tensorflow") is None:
        return "TensorFlow is not installed, so nothing is compared with it: pip install '.[tensorflow]'"
    return "results are compared with TensorFlow, too"


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "slow(but=0): judges what others judge in part, or what no version of jax changes; "
        "`but` so many cases of the test, or tests of the file, are not slow",
    )
    config.addinivalue_line("markers", "nightly: only with --all")
    profile = "many" if config.getoption("all") else "some" if config.getoption("slow") else "few"
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", profile))


def by_hash(item):
    return zlib.crc32(item.nodeid.encode())


def slow_ones(items):
    """Return the tests that are marked `slow`, without a sample of those marked `slow(but=n)`: the least n hashes."""
    slow, sampled = set(), defaultdict(list)
    for item in items:
        for node, mark in item.iter_markers_with_node("slow"):
            if mark.kwargs:
                sampled[node.nodeid.split("[")[0], mark.kwargs["but"]].append(item)
            else:
                slow.add(item)
    for (_, but), group in sampled.items():
        slow.update(sorted(group, key=by_hash)[but:])
    return slow


def pytest_collection_modifyitems(config, items):
    """Leave slow tests out, unless all are asked for, or those of their file, or by an expression, or their part."""
    option = config.option
    if option.all:
        return
    named = {Path(arg.split("::")[0]).resolve() for arg in config.args}
    number, count = option.slow or (-1, 1)
    nightly = {item for item in items if item.get_closest_marker("nightly")}
    others = [item for item in items if item not in nightly]
    slow = set() if option.markexpr or option.keyword else slow_ones(others)

    def is_asked_for(item):
        return item.path in named or by_hash(item) % count == number

    left_out = [item in nightly or (item in slow and not is_asked_for(item)) for item in items]
    config.hook.pytest_deselected(items=list(itertools.compress(items, left_out)))
    items[:] = [item for item, is_out in zip(items, left_out, strict=True) if not is_out]


if library := os.environ.get("TENSORARRAY_EMULATED_GPU"):
    import emulate

    if not Path(library).is_file():
        library = str(emulate.build(Path(tempfile.mkdtemp())))
        os.environ["TENSORARRAY_EMULATED_GPU"] = library  # for the processes of xdist: each would build it
    emulate.install(Path(library))


@pytest.fixture(scope="session", autouse=True)
def no_machine_code_for_a_gpu_that_is_not_here(tmp_path_factory):
    """Most of the time of XLA would go to NVIDIA's assembler, and only HLO is looked at."""
    from jax_tensorarray._hlo import ahead

    assembler = tmp_path_factory.mktemp("cuda") / "bin" / "ptxas"
    assembler.parent.mkdir()
    assembler.write_text(NO_ASSEMBLER)
    assembler.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        options = ahead.OPTIONS["cuda"] | {"xla_gpu_cuda_data_dir": str(assembler.parents[1])}
        patch.setitem(ahead.OPTIONS, "cuda", options)
        yield


@pytest.fixture
def fusions_of_users(monkeypatch):
    """For what is compiled by `lower(...).compile()`."""
    if OTHER_FUSIONS in os.environ.get("XLA_FLAGS", ""):

        def compile(lowered, options=None, *, compile=jax.stages.Lowered.compile, **more):
            return compile(lowered, {"xla_cpu_use_fusion_emitters": True, **(options or {})}, **more)

        monkeypatch.setattr(jax.stages.Lowered, "compile", compile)


@pytest.fixture(scope="module")
def in_single_precision():
    """For what is compared with figures that users see, who compute in 32 bits."""
    with jax.enable_x64(False):
        yield


@pytest.fixture(scope="module")
def every_array_is_sent():
    """For loops with a tape on the host, which send no small rows."""
    from gates import gates

    with gates("open", "SENT_BYTES"):
        yield


@pytest.fixture(autouse=True)
def no_error_is_left_behind():
    """A GPU raises errors later: those that a test did not expect have to be its own."""
    yield
    from jax_tensorarray import check_errors

    check_errors()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Where there should be a GPU, a test that is skipped for lack of one has failed."""
    report = yield
    if report.skipped and "TENSORARRAY_NEEDS_GPU" in os.environ and "needs a GPU" in str(report.longrepr):
        report.outcome, report.longrepr = "failed", f"TENSORARRAY_NEEDS_GPU is set, but: {report.longrepr}"
    return report


def pytest_sessionstart(session):
    import oracle

    oracle.FLUSHES = jax.default_backend() == "cpu"
    if "TENSORARRAY_NEEDS_GPU" in os.environ and jax.default_backend() != "gpu":
        pytest.exit(f"TENSORARRAY_NEEDS_GPU is set, but jax runs on {jax.default_backend()}", returncode=1)
