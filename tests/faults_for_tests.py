"""Faults inside a real job, as an external library of it. The variable JETRL_TEST_FAULT says which:

killed                                 this job's vLLM worker dies in the middle of the second weight sync
missing, shape, dtype                  one weight's FP8 codes are left out, transposed or int8 in the first sync
nan                                    one master weight is not a number when the first sync quantizes it
"""

import os
import signal
import sys

import torch

FAULT = "JETRL_TEST_FAULT"
SPOILT = "model.layers.1.mlp.down_proj.weight"
JOB = "VERL_FILE_LOGGER_PATH"  # in the environment of every process of one job, and different for each
FATAL_SYNC = 2
TENSORS_BEFORE = 5

_syncs = 0


def install() -> None:
    if FAULT not in os.environ or "verl.workers.engine_workers" not in sys.modules:
        return  # imported by the test itself, or by a process of the job that has no trainer
    from jetrl.integrations.verl import engine
    from jetrl.integrations.verl.engine import JetFSDPEngine

    measure, quantized, fault = JetFSDPEngine._measure, engine.quantized_on_the_way, os.environ[FAULT]

    def _measure(self, weights):
        global _syncs
        _syncs += 1
        for number, item in enumerate(measure(self, weights)):
            if fault == "killed" and _syncs == FATAL_SYNC and number == TENSORS_BEFORE:
                kill_workers()
            if item[0] == SPOILT and fault in ("missing", "shape", "dtype"):
                item = spoil(item[1], fault)
            if item is not None:
                yield item

    def with_nan(weights):
        for name, weight in weights:
            if name == SPOILT:
                weight = weight.clone()
                weight[0, 0] = float("nan")
            yield name, weight

    JetFSDPEngine._measure = _measure
    if fault == "nan":
        engine.quantized_on_the_way = lambda weights, *more: quantized(with_nan(weights), *more)


def spoil(weight: torch.Tensor, fault: str) -> tuple[str, torch.Tensor] | None:
    """What is sent in the weight's place; None for nothing."""
    if fault == "missing":
        return None
    if fault == "shape":
        return SPOILT, weight.t().contiguous()
    return SPOILT, weight.to(torch.int8)


def kill_workers() -> None:
    """Of this job only: other jobs on this machine have vLLM workers too."""
    import psutil

    found = []
    for process in psutil.process_iter(["name", "cmdline"]):
        words = " ".join([process.info["name"] or "", *(process.info["cmdline"] or [])])
        if "VLLM::Worker" not in words:
            continue
        try:
            if process.environ().get(JOB) == os.environ[JOB]:
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    assert found, "this job has no vLLM worker"
    for pid in found:
        os.kill(pid, signal.SIGKILL)


install()
