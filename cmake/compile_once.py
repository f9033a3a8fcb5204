"""Compile a file, unless this checkout has compiled the same before: `compile_once.py FOLDER COMPILER ARGUMENTS`.

The kernels take minutes, and are the same in every environment that a checkout is installed in. CMake calls this in
place of the compiler. FOLDER keeps the last object files, each named after all that it is made of: the compiler, its
options, and the contents of the files that the compiler says it reads. Where they cannot be kept, the file is compiled
as if this were not there.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

KEPT = 100
TAKES_PATH = ("-o", "-MT", "-MF", "-I", "-isystem")  # the folders of a build, which are others each time


def dependencies(command: list[str], written_to: str) -> list[Path]:
    """Ask a compiler which files it would read. The answer is left where the build system looks for it, too."""
    asked = [argument for argument in command if argument != "-MD"]
    asked[asked.index("-c")] = "-M"
    output = asked.index("-o")
    del asked[output : output + 2]
    subprocess.run(asked, check=True, stdout=subprocess.DEVNULL)
    names = Path(written_to).read_text().partition(": ")[2].replace("\\\n", " ").replace("\\ ", "\0")
    return [Path(name.replace("\0", " ")) for name in names.split()]


def options(command: list[str]) -> list[str]:
    """Return the arguments of a compiler without the places of files."""
    kept, rest = [], iter(command[1:])
    for argument in rest:
        if argument in TAKES_PATH:
            next(rest)
        elif not argument.startswith("-I") and not Path(argument).exists():
            kept.append(argument)
    return kept


def name_of_object(command: list[str], files: list[Path]) -> str:
    """Return a name that is another one if anything is different that an object file depends on."""
    version = subprocess.run([command[0], "--version"], check=True, capture_output=True).stdout
    name = hashlib.sha256(version + "\0".join(options(command)).encode())
    for file in files:
        name.update(hashlib.sha256(file.read_bytes()).digest())
    return name.hexdigest() + ".o"


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Wait until no other process compiles the same."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_once(folder: Path, command: list[str]) -> None:
    """Put an object file where the command has it, by the command or from the folder."""
    result = Path(command[command.index("-o") + 1])
    kept = folder / name_of_object(command, dependencies(command, command[command.index("-MF") + 1]))
    with alone(kept.with_suffix(".lock")):
        if kept.exists():
            print(f"compiled before: {result.name}, see {folder}")
            os.utime(kept)
            shutil.copyfile(kept, result)
            return
        subprocess.run(command, check=True)
        new = kept.with_suffix(f".{os.getpid()}")
        shutil.copyfile(result, new)
        new.replace(kept)
    for old in sorted(folder.glob("*.o"), key=os.path.getmtime)[:-KEPT]:
        old.unlink(missing_ok=True)
        old.with_suffix(".lock").unlink(missing_ok=True)


def main(folder: str, *command: str) -> int:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        compile_once(Path(folder), list(command))
    except subprocess.CalledProcessError as error:
        if error.cmd == list(command):
            return error.returncode  # the compiler has said why
    except (OSError, ValueError) as error:  # a disk that is full or cannot be written, options that are not as expected
        print(f"cannot keep the object file: {error}", file=sys.stderr)
    else:
        return 0
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
