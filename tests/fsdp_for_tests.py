"""What the two-process tests share: spawn gloo ranks, and wrap a small model as VeRL's engine wraps the actor."""

import os
import socket
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

LOW, HIGH = torch.bfloat16, torch.float32


def run_ranks(function: Callable, world: int, folder: Path, *args) -> list:
    """function(rank, *args) in `world` processes of one gloo group; returns what each rank returned."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.start_processes(_rank, (function, world, port, folder, args), nprocs=world, start_method="spawn")
    return [torch.load(folder / f"rank{rank}", weights_only=False) for rank in range(world)]


def _rank(rank: int, function: Callable, world: int, port: int, folder: Path, args: tuple) -> None:
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        torch.save(function(rank, *args), folder / f"rank{rank}")
    finally:
        dist.destroy_process_group()


def wrap(model: nn.Module, strategy: str, use_orig_params: bool = False) -> nn.Module:
    """Each nn.Linear a unit of its own, then the model: BF16 compute, FP32 reduction, as VeRL's defaults are."""
    if strategy == "fsdp":
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            mixed_precision=MixedPrecision(param_dtype=LOW, reduce_dtype=HIGH, buffer_dtype=HIGH),
            device_id=torch.device("cpu"),
            use_orig_params=use_orig_params,
        )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=HIGH, cast_forward_inputs=True)
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)
