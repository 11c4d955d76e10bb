"""Gradients of BF16 masters over several micro-batches: summed in FP32, rounded to BF16 once.

FSDP reduces a micro-batch's gradient in FP32, rounds it to the parameter's dtype and adds it to what is there. With FP32
masters that is an FP32 sum and nothing is done here. With BF16 masters it would round twice per micro-batch. So:

- FSDP2: while a batch accumulates, the sharded parameters may hold FP32 gradients (torch's `grad_dtype`), and FSDP's
  parameter groups are told that FP32 is what they convert to. After the last micro-batch each gradient is rounded once.
- FSDP1 rounds before it accumulates and offers no such setting, but lets a communication hook do the reduction. The
  hook keeps the FP32 sum of the reduced shards; the last micro-batch's hook hands the sum over, and FSDP rounds it once.

Either way the sum is sharded (4 bytes a parameter over all ranks) and exists only while a batch accumulates. FSDP1's
`no_sync` would sum whole gradients in BF16, so it is not used with BF16 masters.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from jetrl.errors import UserError


class Accumulation:
    """Held by the engine of an actor with BF16 masters; `micro_batch` surrounds each forward and backward."""

    def micro_batch(self, is_last: bool):
        raise NotImplementedError


def accumulation_for(module: torch.nn.Module) -> Accumulation:
    """module: as FSDP wrapped it. Raises UserError for FSDP1's hybrid sharding, which takes no communication hook."""
    return _FlatAccumulation(module) if isinstance(module, FSDP) else _ShardAccumulation(module)


class _ShardAccumulation(Accumulation):
    """FSDP2."""

    def __init__(self, module: FSDPModule) -> None:
        self.module = module
        self.armed = False

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        if not is_last and not self.armed:
            self._arm()
        yield
        if is_last and self.armed:
            self._round()

    def _groups(self) -> list:
        # FSDP sets its dtypes at the first forward; calling it earlier is what its own prefetching API does.
        self.module._get_fsdp_state()._lazy_init()
        states = [m._get_fsdp_state() for m in self.module.modules() if isinstance(m, FSDPModule)]
        return [s._fsdp_param_group for s in states if s._fsdp_param_group is not None]

    def _arm(self) -> None:
        for group in self._groups():
            if group._orig_dtype is torch.bfloat16:
                group._orig_dtype = torch.float32
                for p in group.fsdp_params:
                    p.sharded_param.grad_dtype = torch.float32
        self.armed = True

    def _round(self) -> None:
        for group in self._groups():
            for p in group.fsdp_params:
                param = p.sharded_param
                if param.dtype is torch.bfloat16:
                    group._orig_dtype = torch.bfloat16
                    # Freed one by one: a second copy of all gradients would be the batch's memory peak.
                    total, param.grad = param.grad, None
                    param.grad_dtype = torch.bfloat16
                    param.grad = None if total is None else total.to(torch.bfloat16)
        self.armed = False


class _FlatAccumulation(Accumulation):
    """FSDP1."""

    def __init__(self, module: FSDP) -> None:
        if any(m._inter_node_pg is not None for m in FSDP.fsdp_modules(module) if hasattr(m, "_inter_node_pg")):
            raise UserError(
                "BF16 masters are not supported with FSDP1's hybrid sharding (actor.fsdp_config.fsdp_size); use "
                "actor.strategy=fsdp2, fsdp_size=-1 or masters=fp32"
            )
        self.module = module
        self.sums = [_FlatSum(m) for m in FSDP.fsdp_modules(module) if m._handle is not None]
        for s in self.sums:
            s.module._comm_hook, s.module._comm_hook_state = _reduce, s

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        for s in self.sums:
            s.is_last = is_last
        yield
        if is_last:
            for s in self.sums:
                s.hand_over()
        else:
            for s in self.sums:
                # What FSDP made of the reduced gradient is BF16 and not wanted; the FP32 sum is in the hook's state.
                s.module._handle.flat_param.grad = None
            for p in self.module.parameters():
                p.grad = None


class _FlatSum:
    """The FP32 sum of one flat parameter's gradient shard."""

    def __init__(self, module: FSDP) -> None:
        self.module = module
        self.total: torch.Tensor | None = None
        self.is_last = True

    def add(self, reduced: torch.Tensor) -> None:
        """reduced: this micro-batch's gradient, FP32, which the sum is left in as well."""
        if self.total is not None:
            reduced.add_(self.total)
        # An alias of its own: FSDP rounds by giving the tensor other storage (`.data`), which leaves this one alone.
        self.total = None if self.is_last else reduced.detach()

    def hand_over(self) -> None:
        """Where the last micro-batch had no gradient for these parameters, no hook ran, and the sum is still here."""
        if self.total is None:
            return
        handle = self.module._handle
        flat = handle.flat_param
        flat.grad, self.total = self.total.to(device=flat.device, dtype=flat.dtype), None
        if handle._use_orig_params:
            handle._use_sharded_grad_views()


def _reduce(state: _FlatSum, grad: torch.Tensor, shard: torch.Tensor | None = None) -> None:
    """FSDP1's communication hook: the reduction that FSDP does without one, then the sum.

    grad: the whole padded gradient of this rank, in reduce_dtype. shard: where to leave this rank's part; None where
    nothing is sharded (one rank), and `grad` itself is reduced.
    """
    fsdp = state.module
    _divide(grad, fsdp._gradient_predivide_factor)
    if shard is None:
        dist.all_reduce(grad, group=fsdp.process_group)
    else:
        dist.reduce_scatter_tensor(shard, grad, group=fsdp.process_group)
    reduced = grad if shard is None else shard
    _divide(reduced, fsdp._gradient_postdivide_factor)
    state.add(reduced)


def _divide(tensor: torch.Tensor, factor: float) -> None:
    if factor > 1:
        tensor.div_(factor)
