"""The suite runs in 64 bits, so that derivatives can be compared with finite differences, and on eight CPU devices."""

import os
import sys
import tempfile
from pathlib import Path

import hypothesis
import jax
import pytest
from hypothesis import HealthCheck

# Machine code runs once in a test, and most of the time would go to making it: XLA makes it with less effort here, and
# in the processes that tests start. With `XLA_FLAGS=` it is what users have; CI runs the newest jax so.
OTHER_FUSIONS = "--xla_cpu_use_fusion_emitters=false"
if "TENSORARRAY_NEEDS_GPU" not in os.environ:
    less = "--xla_backend_optimization_level=0"
    os.environ.setdefault("XLA_FLAGS", f"{less} {OTHER_FUSIONS}" if jax.__version_info__ < (0, 11) else less)
if OTHER_FUSIONS in os.environ.get("XLA_FLAGS", ""):

    def compile_to_look_at(lowered, options=None, *, compile=jax.stages.Lowered.compile, **more):
        return compile(lowered, {"xla_cpu_use_fusion_emitters": True, **(options or {})}, **more)

    jax.stages.Lowered.compile = compile_to_look_at

# The helpers of the tests are plain modules in `support`, importable however pytest is started.
sys.path.insert(0, str(Path(__file__).parent / "support"))

jax.config.update("jax_enable_x64", True)

# What is divided among devices is tested on eight; everything else uses the first.
jax.config.update("jax_num_cpu_devices", 8)

# Random programs and the like: `ci` takes minutes and is the same every time, `night` is for HYPOTHESIS_PROFILE.
hypothesis.settings.register_profile(
    "ci", deadline=None, derandomize=True, database=None, max_examples=25, suppress_health_check=list(HealthCheck)
)
hypothesis.settings.register_profile(
    "night", parent=hypothesis.settings.get_profile("ci"), derandomize=False, max_examples=10_000, print_blob=True
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

if library := os.environ.get("TENSORARRAY_EMULATED_GPU"):
    import emulate

    if not Path(library).is_file():
        library = str(emulate.build(Path(tempfile.mkdtemp())))
        os.environ["TENSORARRAY_EMULATED_GPU"] = library  # for the processes of xdist, each of which would build it
    emulate.install(Path(library))


@pytest.fixture(scope="module")
def every_buffer_is_large():
    """For `in_place`, which leaves small ones as they are."""
    from jax_tensorarray._in_place import rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "LEAST_BYTES", 0)
        yield


@pytest.fixture(scope="module")
def every_array_is_sent():
    """For loops with `offload=True`, which send no small rows."""
    from jax_tensorarray._loops import tapes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tapes, "SMALL", 16)
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


def pytest_configure(config):
    config.addinivalue_line("markers", "process: starts Python anew and takes seconds; CI does that on one Python only")


def pytest_sessionstart(session):
    import oracle

    oracle.FLUSHES = jax.default_backend() == "cpu"
    if "TENSORARRAY_NEEDS_GPU" in os.environ and jax.default_backend() != "gpu":
        pytest.exit(f"TENSORARRAY_NEEDS_GPU is set, but jax runs on {jax.default_backend()}", returncode=1)
