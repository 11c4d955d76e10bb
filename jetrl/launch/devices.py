"""Refusals that depend on this machine's devices: how many there are, and whether FP8 runs on them."""

import os

from omegaconf import DictConfig

from jetrl import gemm_backend
from jetrl.errors import UserError
from jetrl.precision.flow import load_flow


def check_devices(cfg: DictConfig) -> None:
    """The hardware group fits this machine. Jobs of several nodes are left to Ray."""
    import torch

    count, wanted = torch.cuda.device_count(), cfg.trainer.n_gpus_per_node
    if cfg.trainer.device == "cpu":
        if count:
            raise UserError(
                f"hardware={cfg.choices.hardware} needs a machine without a visible GPU, and {count} are visible; "
                "run it with CUDA_VISIBLE_DEVICES=-1"
            )
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            raise UserError(
                f"CUDA_VISIBLE_DEVICES is empty, and Ray then refuses the imaginary GPU of hardware={cfg.choices.hardware}; "
                "unset it, or set it to -1"
            )
        ranks = cfg.ray_kwargs.ray_init.get("num_gpus")
        if cfg.trainer.nnodes == 1 and isinstance(ranks, int) and wanted > ranks:
            raise UserError(
                f"trainer.n_gpus_per_node={wanted} is more than the {ranks} imaginary GPUs that Ray starts with on a CPU "
                "(ray_kwargs.ray_init.num_gpus); lower it, or raise both"
            )
        from jetrl.integrations import verl_cpu

        if not verl_cpu.is_active():
            raise UserError(
                "VeRL did not take jetrl's CPU platform; unset VERL_PLATFORM and VERL_USE_EXTERNAL_PLUGINS, and see that "
                "jetrl is installed (pip install --no-deps -e . in a checkout)"
            )
    elif cfg.trainer.nnodes == 1 and count < wanted:
        raise UserError(
            f"trainer.n_gpus_per_node={wanted} (hardware={cfg.choices.hardware}) and {count} GPUs are visible; choose "
            "another hardware= or set trainer.n_gpus_per_node"
        )


def check_gemm(cfg: DictConfig) -> None:
    """An FP8 flow's GEMM backend runs here; else the trainer would learn it at its first product, minutes into the job.

    Jobs of several nodes are left to their workers: the node that starts Ray may have no GPU.
    """
    flow = load_flow(cfg.actor_rollout_ref.model.override_config.jetrl_flow)
    if cfg.trainer.nnodes == 1 and "fp8" in (flow.train.linear, flow.rollout.linear):
        gemm_backend.check_gemm(cfg.gemm)
