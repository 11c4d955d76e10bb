"""Safetensors shards with an index, as transformers writes them, one shard in memory at a time."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

SHARD_BYTES = 5 * 10**9


def write_weights(folder: Path, weights: Iterator[tuple[str, torch.Tensor]]) -> int:
    """`model.safetensors`, or numbered shards and their index. Returns the bytes of all tensors."""
    written: list[Path] = []
    where: dict[str, int] = {}
    shard: dict[str, torch.Tensor] = {}
    total = size = 0
    for name, tensor in weights:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            written.append(_save(folder, shard, len(written)))
            shard, size = {}, 0
        shard[name] = tensor.contiguous()
        where[name] = len(written)
        size += tensor.nbytes
        total += tensor.nbytes
    written.append(_save(folder, shard, len(written)))
    if len(written) == 1:
        written[0].rename(folder / "model.safetensors")
        return total
    names = [f"model-{i + 1:05d}-of-{len(written):05d}.safetensors" for i in range(len(written))]
    for path, name in zip(written, names, strict=True):
        path.rename(folder / name)
    index = {"metadata": {"total_size": total}, "weight_map": {name: names[i] for name, i in sorted(where.items())}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return total


def _save(folder: Path, tensors: dict[str, torch.Tensor], number: int) -> Path:
    path = folder / f"part-{number}.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path
