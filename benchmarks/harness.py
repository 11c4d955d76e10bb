"""Timing and reporting shared by the kernel benchmarks.

A measurement captures one CUDA graph that calls the code over several sets of inputs in turn (together well past the L2
cache) and times its replays, so that launch gaps of Python and cached inputs stay out. Baseline and ours run in one process.
"""

import datetime
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

L2_BYTES = 60 << 20
REPLAYS = 9


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median of the replays and (max - min) / median over them."""

    us: float
    spread: float


def require_gpu() -> None:
    """Ends the program, exit code 2, with one sentence where there is nothing to measure on.

    For programs without a rehearsal on a CPU, after they parsed their arguments (so that --help works anywhere).
    """
    if not torch.cuda.is_available():
        print(f"{Path(sys.argv[0]).name}: error: there is no GPU here; run it on a machine with one", file=sys.stderr)
        raise SystemExit(2)


def time_calls(calls: Sequence[Callable[[], object]], repeats: int = 1) -> Timing:
    """Time one pass over `calls` (one per input set), `repeats` passes per graph; per call."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (repeats * len(calls)))
    median = statistics.median(times)
    return Timing(median, (max(times) - min(times)) / median)


def input_sets(bytes_per_set: int) -> int:
    """How many sets of inputs pass the L2 cache three times over (at least 2)."""
    return max(2, -(-3 * L2_BYTES // bytes_per_set))


def copy_bandwidth() -> float:
    """Device-to-device copy rate in bytes per second, bytes read plus bytes written, of a 2 GiB copy (median).

    Not in a graph: there a copy of this size becomes a memcpy node that runs at two thirds of the rate.
    """
    x = torch.randint(0, 255, (2 << 30,), dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    times = []
    for _ in range(REPLAYS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        y.copy_(x)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return 2 * x.numel() / statistics.median(times[2:])


def geometric_mean(values: Sequence[float]) -> float:
    return statistics.geometric_mean(values)


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return found.stdout.strip() if found.returncode == 0 else "unknown"


def environment() -> dict[str, str]:
    import triton

    names = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
    for module in ("deep_gemm", "torchao"):
        try:
            names[module] = getattr(__import__(module), "__version__", "unknown")
        except ImportError:
            names[module] = "absent"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return names | {"gpu": gpu, "commit": commit()}


def print_table(rows: Sequence[dict]) -> None:
    """Columns in the order of the first row; floats to three significant digits past the point where it matters."""

    def text(value) -> str:
        return f"{value:.3g}" if isinstance(value, float) and abs(value) < 10 else (
            f"{value:.1f}" if isinstance(value, float) else str(value)
        )  # fmt: skip

    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names] + [[text(row.get(name, "")) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)


def write_results(name: str, rows: Sequence[dict], folder: Path | None = None, **extra) -> Path:
    """Dated JSON with versions, GPU and commit; returns its path. Default folder: benchmarks/results."""
    folder = folder or Path(__file__).parent / "results"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{datetime.date.today().isoformat()}.json"
    path.write_text(json.dumps({"name": name, **environment(), **extra, "rows": list(rows)}, indent=1) + "\n")
    return path
