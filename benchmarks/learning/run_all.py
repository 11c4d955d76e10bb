"""All runs of the learning comparison as concurrent processes on one GPU, then the report.

    python -m benchmarks.learning.run_all --out FOLDER [--seeds 3] [--variants NAME ...] [--at-once 6] [--steps 600] [--until SECONDS]

Some seeds of BF16, of both scale formats, of wgrad=blocks and of the control (BF16 from a start that differs in one bit); once each the other ways to get weight
gradients. Processes share the GPU in time slices, so their seconds say nothing about speed; losses do not depend on it.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from . import report
from .model import NUDGED, VARIANTS

REPEATED = ("bf16", "unified_fp8", "unified_fp8_pow2", "unified_fp8 wgrad=blocks", NUDGED)


def plan(direction: bool, seeds: int, variants: list[str]) -> list[tuple[str, int, bool]]:
    """(variant, seed, whether gradients are compared), the repeated variants first."""
    repeated = [v for v in REPEATED if v in variants]
    runs = [(v, seed, direction and (v, seed) == ("unified_fp8", 0)) for seed in range(seeds) for v in repeated]
    return runs + [(variant, 0, False) for variant in variants if variant not in REPEATED]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3, help="of the repeated variants")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--size", default="full")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--no-direction", action="store_true", help="leave the gradients' directions out")
    parser.add_argument("--until", type=float, default=1e9, help="seconds after which no further run is started")
    a = parser.parse_args()
    if "bf16" not in a.variants:
        parser.error("--variants must name bf16, which the others are compared with")
    runs, logs = a.out / "runs", a.out / "logs"
    for folder in (runs, logs):
        folder.mkdir(parents=True, exist_ok=True)
    waiting, running, began, failed = plan(not a.no_direction, a.seeds, a.variants), [], time.monotonic(), []
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
