"""All runs of the learning comparison as concurrent processes on one GPU, then the report.

    python -m benchmarks.learning.run_all --out FOLDER [--at-once 6] [--steps 600] [--until SECONDS]

Three seeds of BF16 and of both scale formats; once each the other ways to get weight gradients. Processes share the GPU in
time slices, so their seconds say nothing about speed; losses do not depend on it.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from . import report
from .model import VARIANTS

SEEDS = (0, 1, 2)
REPEATED = ("bf16", "unified_fp8", "unified_fp8_pow2")


def plan(direction: bool) -> list[tuple[str, int, bool]]:
    """(variant, seed, whether gradients are compared), the repeated variants first."""
    runs = [(v, seed, direction and (v, seed) == ("unified_fp8", 0)) for seed in SEEDS for v in REPEATED]
    return runs + [(variant, 0, False) for variant in VARIANTS if variant not in REPEATED]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--size", default="full")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--no-direction", action="store_true", help="leave the gradients' directions out")
    parser.add_argument("--until", type=float, default=1e9, help="seconds after which no further run is started")
    a = parser.parse_args()
    runs, logs = a.out / "runs", a.out / "logs"
    for folder in (runs, logs):
        folder.mkdir(parents=True, exist_ok=True)
    waiting, running, began, failed = plan(not a.no_direction), [], time.monotonic(), []
    while waiting or running:
        for process, name, log in list(running):
            if process.poll() is not None:
                running.remove((process, name, log))
                print(f"{time.monotonic() - began:.0f} s: {name} ended with {process.returncode}", flush=True)
                if process.returncode:
                    failed.append(name)
                    print(log.read_text()[-3000:], flush=True)
        while waiting and len(running) < a.at_once:
            variant, seed, direction = waiting.pop(0)
            if time.monotonic() - began > a.until:
                failed.append(f"{variant} seed {seed} (not started in time)")
                continue
            command = [
                sys.executable,
                "-m",
                "benchmarks.learning.train",
                variant,
                "--seed",
                str(seed),
                "--out",
                str(runs),
            ]
            command += ["--steps", str(a.steps), "--size", a.size, "--rows", str(a.rows), "--length", str(a.length)]
            command += ["--direction"] * direction
            log = logs / f"{variant.replace(' ', '_')}-{seed}.log"
            with log.open("w") as sink:
                running.append(
                    (subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT), f"{variant} {seed}", log)
                )
        time.sleep(0.2)
    report.write(runs, a.out)
    if failed:
        sys.exit(f"not finished: {', '.join(failed)}")


if __name__ == "__main__":
    main()
