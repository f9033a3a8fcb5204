"""Compile the kernels for every major architecture; print what registers they take, and fail on a spill or warning.

python tests/gpu/nvcc_report.py        # all of them
python tests/gpu/nvcc_report.py 5/3    # a third, another one for each number
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CSRC = Path(__file__).parents[2] / "csrc"
KERNEL = re.compile(r"(do_nothing|(?<=run<jax_tensorarray::)\w+)")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")


def major_architectures(nvcc: str) -> list[str]:
    """What `-arch=all-major` stands for."""
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout.split()
    numbers = sorted(int(name.removeprefix("compute_")) for name in listed)
    return [str(n) for n in numbers if n % 10 == 0 or n == numbers[0]]


def compiled(nvcc: str, architecture: str) -> tuple[int, str]:
    """Exit code of nvcc, and all that it and ptxas said, with names that can be read."""
    with tempfile.TemporaryDirectory() as folder:
        code = f"arch=compute_{architecture},code=sm_{architecture}"
        command = [nvcc, "-std=c++17", "-O3", "-gencode", code, "-Xptxas", "-v,-warn-spills", "-Werror", "all-warnings"]
        command += [f"-I{CSRC}", "-c", str(CSRC / "cuda.cu"), "-o", f"{folder}/cuda.o"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = subprocess.run(["c++filt"], input=done.stderr, capture_output=True, text=True, check=True).stdout
    return done.returncode, said


def report(nvcc: str, architecture: str) -> list[str]:
    """What is wrong with the kernels for one architecture, after a line for each of their kinds."""
    code, said = compiled(nvcc, architecture)
    wrong = [f"sm_{architecture}: nvcc ended with {code}"] if code else []
    wrong += [f"sm_{architecture}: {line}" for line in said.splitlines() if re.search("warning|error", line)]
    registers: dict[str, list[int]] = {}
    kernel, frames = "", Counter[tuple[int, ...]]()
    for line in said.splitlines():
        if "Compiling entry function" in line and (match := KERNEL.search(line)):
            kernel = match.group(1)
        if match := FRAME.search(line):
            frame = tuple(map(int, match.groups()))
            frames[frame] += 1
            if any(frame):
                wrong.append(f"sm_{architecture}: {kernel}: {line.strip()}")
        if match := REGISTERS.search(line):
            registers.setdefault(kernel, []).append(int(match.group(1)))
    if not registers:
        wrong.append(f"sm_{architecture}: no kernel in the report of ptxas")
    used = ", ".join(f"{name} {min(n)}-{max(n)}" for name, n in sorted(registers.items()))
    count = sum(map(len, registers.values()))
    print(f"sm_{architecture}: {count} kernels, registers: {used}; {len(wrong)} spills or warnings", flush=True)
    return wrong


def part(architectures: list[str], which: str = "0/1") -> list[str]:
    """Return every nth of them, from the kth on: "k/n"."""
    number, parts = map(int, which.split("/"))
    return architectures[number % parts :: parts]


def main(arguments: list[str]) -> int:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        print("nvcc is not here: nothing is compiled for a GPU")
        return 0
    with ThreadPoolExecutor(2) as pool:
        chosen = part(major_architectures(nvcc), *arguments)
        wrong = [text for found in pool.map(lambda a: report(nvcc, a), chosen) for text in found]
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
