"""A vLLM worker's answer to "which precision graph do you run?".

The channel: VeRL's rollout is a Ray actor around vLLM's AsyncLLM; the trainer asks that engine for a collective RPC named
REPORT_METHOD, and every worker process answers for itself. vLLM's hook for extra worker methods, `worker_extension_cls`,
takes one class and VeRL already uses it, so the plug-in adds its methods to vLLM's worker base class (vLLM 0.24 seen).
It can go when vLLM accepts several worker extensions.
"""

import functools
import os
import uuid

import torch
from vllm.v1.worker.worker_base import WorkerBase

from jetrl.integrations.protocol import REPORT_METHOD, SOCKET_METHOD, socket_job, versions
from jetrl.integrations.vllm import refit_plan
from jetrl.precision.build_vllm import build_rollout_graph
from jetrl.precision.graph import PrecisionGraph
from jetrl.precision.kernels import with_kernels

# Tells a restarted worker from the one that answered before.
_PROCESS_ID = f"{os.getpid()}-{uuid.uuid4().hex}"

# What VeRL reads when a weight sync begins, and what it was when this process started.
_SOCKET_JOB = "VERL_RAY_JOB_ID"
_stock_job = os.environ.get(_SOCKET_JOB, "0")

_trainer_has_asked = False


def trainer_has_asked() -> bool:
    """True once a trainer has asked this process for its graph."""
    return _trainer_has_asked


def report(worker: WorkerBase, known_digests: list[str]) -> dict:
    """This worker's precision graph, read off the live model, so it says what runs, not what was configured.

    Plain containers only. `graph` is None where the trainer already knows it by its digest: an 8B graph is megabytes,
    and this runs at every weight sync.
    """
    global _trainer_has_asked
    config = worker.vllm_config
    exact = (
        config.quant_config is not None
        and config.quant_config.get_name() == "jetrl"
        and (config.quant_config.flow(config).rollout.exact)
    )
    graph, digest = _graph_of(worker.model_runner.model, exact)
    # Here because this comes before every sync, and nothing else of jetrl's sees the whole model.
    has_table = refit_plan.attach(worker.get_model())
    _trainer_has_asked = True
    return {
        "process": _PROCESS_ID,
        "rank": worker.rank,
        "digest": digest,
        "graph": None if digest in known_digests else graph.to_dict(),
        "versions": versions(),
        # What load_weights takes: vLLM's own FP8 layers may have our format, but not our wire, and no more has a drafter
        # that VeRL gives the same weights (speculative_config.method=mtp).
        "wires": ("bf16", "fp8") if has_table and config.speculative_config is None else ("bf16",),
    }


@functools.lru_cache(maxsize=1)
def _graph_of(model: torch.nn.Module, exact: bool) -> tuple[PrecisionGraph, str]:
    """Layers get their formats when the model is built, so one graph per model object is enough.

    exact: with the kernel that each operator runs, which an exact flow compares too.
    """
    graph = build_rollout_graph(model)
    if exact:
        from jetrl.integrations.vllm.exact import rollout_kernels

        graph = with_kernels(graph, rollout_kernels(model))
    return graph, graph.digest()


def name_socket(worker: WorkerBase, token: str) -> None:
    """The next weight sync is awaited on the run's own socket (integrations/verl/sync_socket.py)."""
    os.environ[_SOCKET_JOB] = socket_job(_stock_job, token)


def install() -> None:
    """Idempotent."""
    setattr(WorkerBase, REPORT_METHOD, report)
    setattr(WorkerBase, SOCKET_METHOD, name_socket)
