"""GPU time of repeated steps, by kernel, from torch's profiler: for engines whose host cannot keep up with the GPU."""

import time
from collections.abc import Callable

import torch

GAP_US = 5.0  # kernels of a CUDA graph follow each other within a microsecond or two; a launch by the host takes longer
SHOWN = 28


def busy_us(intervals: list[tuple[float, float]]) -> float:
    """Time covered by the intervals (us, may overlap) and by pauses of at most GAP_US between them."""
    total, until = 0.0, None
    for began, ended in sorted(intervals):
        if until is None or began - until > GAP_US:
            total, until = total + ended - began, ended
        elif ended > until:
            total, until = total + ended - until, ended
    return total


def gpu_time(title: str, step: Callable[[], object], steps: int = 8) -> dict[str, float]:
    """Runs `step` and prints its GPU time by kernel. ms a step:

    wall_ms, kernels_ms (their sum), gpu_ms (busy_us: what a step would take at least if the host were never late).
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        began = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        wall = (time.perf_counter() - began) / steps
    rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)
    on_gpu = [
        event.time_range
        for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    result = {
        "wall_ms": wall * 1e3,
        "kernels_ms": sum(row.self_device_time_total for row in rows) / 1e3 / steps,
        "gpu_ms": busy_us([(t.start, t.end) for t in on_gpu]) / 1e3 / steps,
    }
    print(f"profile: {title}:", *(f"{name} {value:.3f}" for name, value in result.items()), flush=True)
    for row in rows[:SHOWN]:
        milliseconds, count = row.self_device_time_total / 1e3 / steps, row.count / steps
        print(f"  {milliseconds:7.3f} ms {count:7.1f} x  {row.key[:110]}", flush=True)
    return result
