"""The loops of the main job, at more sizes and with more repetitions. Writes JSON into benchmarks/results.

python benchmarks/programs.py --help
"""

import argparse
import json
import os
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import jax
import numpy as np

from jax_tensorarray import _hlo
from jax_tensorarray.__main__ import SIDES, gradient, second_order, versions
from jax_tensorarray._programs import programs

DERIVATIVES = {"forward": lambda f: f, "gradient": gradient.of, "second order": second_order.of}


def machine():
    """What the figures depend on."""
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":")[1].strip() if names else cpu
    return {
        "platform": platform.platform(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "devices": [f"{d.platform}:{d.id} ({d.device_kind})" for d in jax.devices()],
    }


def measure(f, x, repeat, longest):
    """Seconds of each of `repeat` runs after one that warms up; that one alone if it takes longer than `longest`."""
    compiled = jax.jit(f).lower(x).compile()
    times = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        jax.block_until_ready(compiled(x))
        times.append(time.perf_counter() - start)
        if times[-1] > longest:
            break
    hlo = compiled.as_text()
    return {
        "seconds": times[1:] or times,
        "copies": len(_hlo.loop_copies(hlo, x.nbytes)),
        "whole_buffer_operations": len(_hlo.loop_whole_buffer_operations(hlo, x.nbytes)),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=programs, default=list(programs), metavar="NAME")
    parser.add_argument("--sizes", nargs="+", type=int, default=[250, 500, 1000, 2000, 4000, 8000, 16000], metavar="T")
    parser.add_argument("--row", nargs="+", type=int, default=[64], metavar="N", help="shape of a row")
    parser.add_argument("--repeat", type=int, default=10, help="runs timed at each T")
    parser.add_argument("--longest", type=float, default=10.0, help="a side goes no further in T after such a run (s)")
    parser.add_argument("--output", type=Path, help="default: results/programs-jax<version>-<platform>.json")
    arguments = parser.parse_args()
    name = f"programs-jax{jax.__version__}-{jax.default_backend()}.json"
    output = arguments.output or Path(__file__).parent / "results" / name

    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": machine(),
        "row": arguments.row,
        "results": [],
    }
    for program in arguments.programs:
        for derivative, of in DERIVATIVES.items():
            for side, ops in SIDES.items():
                for T in arguments.sizes:
                    x = jax.device_put(np.random.default_rng(0).standard_normal((T, *arguments.row), dtype=np.float32))
                    found = measure(of(programs[program].with_ops(ops)), x, arguments.repeat, arguments.longest)
                    case = {"program": program, "derivative": derivative, "side": side, "T": T}
                    report["results"].append(case | found)
                    microseconds = min(found["seconds"]) / T * 1e6
                    print(f"{program:22} {derivative:13} {side:16} T={T:<6} {microseconds:9.2f} us/step", flush=True)
                    if min(found["seconds"]) > arguments.longest:
                        break
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"Wrote {output}.")


if __name__ == "__main__":
    sys.exit(main())
