"""tools/build_wheels.py refuses artifacts that are not what a release has."""

import importlib.util
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "build_wheels.py"
if not SCRIPT.exists():
    pytest.skip("needs the sources of the build", allow_module_level=True)
spec = importlib.util.spec_from_file_location("build_wheels", SCRIPT)
build_wheels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build_wheels)

ABI3 = "jax_tensorarray-1.2.3-cp312-abi3-linux_x86_64.whl"
FILES = {
    "jax_tensorarray/__init__.py": "",
    "jax_tensorarray/_ops/read.py": "",
    "jax_tensorarray/doctor/messages.md": "",
    "jax_tensorarray/_template/.gitignore": "",
    "jax_tensorarray/py.typed": "",
    "jax_tensorarray/_cpu.abi3.so": "",
    "jax_tensorarray-1.2.3.dist-info/METADATA": "",
    "jax_tensorarray-1.2.3.dist-info/RECORD": "",
}
PLUGIN = "jax_tensorarray_cuda13-1.2.3-cp311-cp311-linux_x86_64.whl"
PLUGIN_FILES = {
    "jax_tensorarray_cuda13/__init__.py": "",
    "jax_tensorarray_cuda13/_cuda.cpython-311-x86_64-linux-gnu.so": "",
    "jax_tensorarray_cuda13-1.2.3.dist-info/METADATA": "Requires-Dist: jax-tensorarray[cuda13]==1.2.3\n",
}


@pytest.fixture
def check(tmp_path):
    package = ("__init__.py", "_ops/read.py", "py.typed", "_cpu.cpython-311-x86_64-linux-gnu.so")
    for name in (*(f"jax_tensorarray/{name}" for name in package), "template/.gitignore"):
        file = tmp_path / "source" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()

    def check(name, files, kind="abi3", package="jax_tensorarray"):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for file, text in files.items():
                archive.writestr(file, text)
        return build_wheels.check_wheel(tmp_path / name, package, kind, tmp_path / "source", "1.2.3")

    return check


def without(files, *names):
    return {name: text for name, text in files.items() if name not in names}


def test_good_wheels_pass(check):
    assert check(ABI3, FILES) == "8 files"
    own = without(FILES, "jax_tensorarray/_cpu.abi3.so") | {"jax_tensorarray/_cpu.cpython-311-darwin.so": ""}
    assert check("jax_tensorarray-1.2.3-cp311-cp311-macosx_11_0_arm64.whl", own, "cp311") == "8 files"
    assert check(PLUGIN, PLUGIN_FILES, "cp311", "jax_tensorarray_cuda13") == "3 files"


@pytest.mark.parametrize(
    ("name", "files"),
    [
        pytest.param(ABI3, FILES | {"tests/conftest.py": ""}, id="tests"),
        pytest.param(ABI3, FILES | {"jax_tensorarray/cpu.cc": ""}, id="sources"),
        pytest.param(ABI3, FILES | {"jax_tensorarray/_cuda.abi3.so": ""}, id="CUDA"),
        pytest.param(ABI3, FILES | {"jax_tensorarray/_cpu.cpython-311-x86_64-linux-gnu.so": ""}, id="two modules"),
        pytest.param(ABI3, without(FILES, "jax_tensorarray/_cpu.abi3.so"), id="no module"),
        pytest.param(ABI3, without(FILES, "jax_tensorarray/_ops/read.py"), id="a file too few"),
        pytest.param(ABI3, without(FILES, "jax_tensorarray/doctor/messages.md"), id="no page of messages"),
        pytest.param(ABI3, without(FILES, "jax_tensorarray/_template/.gitignore"), id="no template"),
        pytest.param(
            ABI3,
            without(FILES, "jax_tensorarray/_cpu.abi3.so")
            | {"jax_tensorarray/_cpu.cpython-312-x86_64-linux-gnu.so": ""},
            id="a module for one Python",
        ),
        pytest.param(ABI3.replace("abi3", "cp312"), FILES, id="tag"),
        pytest.param(ABI3.replace("cp312", "cp313"), FILES, id="tag of a newer Python"),
        pytest.param(ABI3.replace("1.2.3", "1.2.4"), FILES, id="version"),
        pytest.param(ABI3, FILES | {"jax_tensorarray/__init__.py": "#" * 2_000_000}, id="size"),
    ],
)
def test_wheels_that_are_not_as_they_should_be_fail(check, name, files):
    with pytest.raises(build_wheels.Failure):
        check(name, files)


def test_a_plugin_that_asks_for_no_version_or_another_one_fails(check):
    for version in ("==1.2.2", ""):
        metadata = {
            "jax_tensorarray_cuda13-1.2.3.dist-info/METADATA": f"Requires-Dist: jax-tensorarray[cuda13]{version}"
        }
        with pytest.raises(build_wheels.Failure, match="does not ask for"):
            check(PLUGIN, PLUGIN_FILES | metadata, "cp311", "jax_tensorarray_cuda13")


def test_an_sdist_with_something_that_was_built_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(build_wheels, "ROOT", tmp_path)  # no git there

    def sdist(*names):
        file = tmp_path / "jax_tensorarray-1.2.3.tar.gz"
        with tarfile.open(file, "w:gz") as archive:
            for name in names:
                archive.addfile(tarfile.TarInfo(f"jax_tensorarray-1.2.3/{name}"), io.BytesIO())
        return build_wheels.check_sdist(file)

    assert sdist("PKG-INFO", "csrc/cpu.cc") == "2 files"
    for name in ("jax_tensorarray/_cpu.abi3.so", "jax_tensorarray/__pycache__/_ffi.cpython-312.pyc", "build/cpu.o"):
        with pytest.raises(build_wheels.Failure, match="built files"):
            sdist("PKG-INFO", name)


def test_a_command_that_fails_says_what_it_said_last(tmp_path):
    with pytest.raises(build_wheels.Failure, match=r"exit code 3: .*\nso long"):
        build_wheels.run("sh", "-c", "echo so long; exit 3", cwd=tmp_path)


def test_the_tests_that_run_in_a_wheel_are_there():
    assert all((build_wheels.ROOT / "tests" / name).exists() for name in build_wheels.TESTS)
