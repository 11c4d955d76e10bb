"""Which master weights the optimizer owns: said once at the job's start, never changed here.

jetrl.train chooses them (`masters=bf16|fp32`, jetrl/launch/wiring.py); an existing VeRL job keeps its own.
"""

import torch
from torch.distributed.tensor import DTensor


def describe(optimizer: torch.optim.Optimizer) -> str:
    """One line for the log, from the live optimizer: dtype of its parameters, and what its rounding does to an update."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    dtypes = {p.dtype for p in parameters}
    name = f"{type(optimizer).__module__.split('.')[0]}'s {type(optimizer).__name__}"
    if dtypes == {torch.float32}:
        return f"FP32 masters ({name})"
    if dtypes != {torch.bfloat16}:
        return f"masters of {', '.join(sorted(str(d).removeprefix('torch.') for d in dtypes))} ({name})"
    if getattr(optimizer, "bf16_stochastic_round", False):
        return f"BF16 masters with stochastic rounding ({name})"
    return (
        f"warning: plain BF16 masters ({name}): an update below 1/512 of its weight is rounded away, which at an RL "
        "learning rate is nearly all of them; set actor.fsdp_config.model_dtype=fp32, or "
        "actor.optim.optimizer_impl=jetrl.optimizer with actor.optim.optimizer=StochasticAdamW"
    )


def describe_no_sync(engine_config, sums_itself: bool) -> str | None:
    """What becomes of VeRL's option to reduce gradients once a batch. sums_itself: jetrl accumulates (BF16 masters)."""
    if not engine_config.use_no_sync_for_gradient_accumulation:
        return None
    key = "actor.fsdp_config.use_no_sync_for_gradient_accumulation"
    if sums_itself:
        return (
            f"{key}=true is not used with BF16 masters: their gradients are reduced and summed in FP32 per micro-batch"
        )
    if engine_config.strategy == "fsdp":
        return (
            f"warning: {key}=true with actor.strategy=fsdp sums the gradients of micro-batches in BF16; set it to false"
        )
    return None


def are_bf16(module: torch.nn.Module) -> bool:
    """Whether any trainable parameter (under FSDP: flat parameter or shard) is BF16."""
    return any(p.dtype is torch.bfloat16 for p in module.parameters() if p.requires_grad)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
