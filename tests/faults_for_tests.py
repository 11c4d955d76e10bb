"""Faults inside a real job: an external library of the job that kills this job's vLLM worker in the middle of a weight sync."""

import os
import signal
import sys

JOB = "VERL_FILE_LOGGER_PATH"  # in the environment of every process of one job, and different for each
FATAL_SYNC = 2
TENSORS_BEFORE = 5

_syncs = 0


def install() -> None:
    if "verl.workers.engine_workers" not in sys.modules:
        return
    from jetrl.integrations.verl.engine import JetFSDPEngine

    measure = JetFSDPEngine._measure

    def _measure(self, weights):
        global _syncs
        _syncs += 1
        for number, item in enumerate(measure(self, weights)):
            if _syncs == FATAL_SYNC and number == TENSORS_BEFORE:
                kill_workers()
            yield item

    JetFSDPEngine._measure = _measure


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
