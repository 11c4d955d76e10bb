"""Many weights in one tensor: VeRL's sender and receiver spend 25 and 12 us of host on each tensor, whatever its size.

A bundle is a flat tensor under a name that lists what is in it. Two kinds: packed matrices (packed_weight.py) that lie behind
one another in memory as their Slab made them, which costs no copy, and norms, copied together. The receiver takes bundles
apart before it looks at any name, so what it checks of a weight does not depend on how the weight came.
"""

import functools
import json
from collections.abc import Iterable, Iterator

import torch
from jetrl_kernels.constants import E4M3

MATRICES, NORMS = "jetrl.matrices:", "jetrl.norms:"


def bundled(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same weights in fewer tensors. Norms come last; matrices, after at most a slab of others."""
    run, norms, behind = [], {}, None
    for name, tensor in weights:
        if tensor.dtype == E4M3 and tensor.is_contiguous():
            start, storage = tensor.data_ptr(), tensor.untyped_storage().data_ptr()
            if run and (start, storage) != behind:
                yield _matrices(run)
                run = []
            run.append((name, tensor))
            behind = start + tensor.numel(), storage
        # By name too: VeRL's receiver looks a model's buffers up by theirs.
        elif tensor.dim() == 1 and name.endswith("norm.weight"):
            norms.setdefault((tensor.dtype, tensor.device), []).append((name, tensor))
        else:
            yield name, tensor
    if run:
        yield _matrices(run)
    for alike in norms.values():
        yield NORMS + _manifest(alike), torch.cat([tensor for _, tensor in alike])


def unbundled(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """What `bundled` was given, in another order: views of its tensors. Others pass as they are."""
    for name, tensor in weights:
        if name.startswith((MATRICES, NORMS)):
            names, shapes, sizes = _read(name)
            flat = tensor.view(E4M3) if name.startswith(MATRICES) else tensor
            for part, shape, piece in zip(names, shapes, flat.split_with_sizes(sizes), strict=True):
                yield part, piece.view(shape)
        else:
            yield name, tensor


def _matrices(run: list[tuple[str, torch.Tensor]]) -> tuple[str, torch.Tensor]:
    if len(run) == 1:
        return run[0]
    first = run[0][1]
    size = sum(tensor.numel() for _, tensor in run)
    # As float32, which a bucket aligns: scales are then read where they lie.
    return MATRICES + _manifest(run), first.as_strided((size,), (1,), first.storage_offset()).view(torch.float32)


def _manifest(weights: list[tuple[str, torch.Tensor]]) -> str:
    return json.dumps([(name, *tensor.shape) for name, tensor in weights])


@functools.lru_cache(maxsize=4096)
def _read(name: str) -> tuple[list[str], list[tuple[int, ...]], list[int]]:
    """Names, shapes and element counts. Every sync brings the same bundles."""
    entries = json.loads(name.split(":", 1)[1])
    shapes = [tuple(shape) for _, *shape in entries]
    return [part for part, *_ in entries], shapes, [torch.Size(shape).numel() for shape in shapes]
