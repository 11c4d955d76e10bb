"""One point of the forward in both engines: how many values differ in their bits, and by how much."""

from dataclasses import asdict, dataclass

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Difference:
    """values, differing: counted over rows x features. max_abs: largest |trainer - rollout|; max_relative: the largest
    over rows of (largest |difference| in the row) / (largest |rollout| in the row), so that values near zero do not
    count for more than they do. prefill_rows, decode_rows: rows with any difference, by how the rollout computed them."""

    values: int
    differing: int
    max_abs: float
    max_relative: float
    rows: int
    prefill_rows: int
    decode_rows: int

    @property
    def equal(self) -> bool:
        return self.differing == 0

    @property
    def share(self) -> float:
        return self.differing / self.values if self.values else 0.0

    def to_dict(self) -> dict:
        return {**asdict(self), "bits_equal_share": 1.0 - self.share}


def difference(rollout: torch.Tensor, trainer: torch.Tensor, decode: torch.Tensor) -> Difference:
    """rollout, trainer (R, F); decode (R,) bool. Tensors of different dtypes are compared as float32."""
    if rollout.dtype != trainer.dtype:
        rollout, trainer = rollout.float(), trainer.float()
    bits = _BITS[rollout.element_size()]
    differs = rollout.contiguous().view(bits) != trainer.contiguous().view(bits)
    rows = differs.any(dim=1)
    gap, size = (trainer.float() - rollout.float()).abs(), rollout.float().abs()
    if not differs.any():
        gap = torch.zeros_like(gap)  # not -inf minus -inf
    largest = gap.amax(dim=1) if gap.numel() else gap.new_zeros(0)
    relative = largest / size.amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) if gap.numel() else largest
    return Difference(
        values=differs.numel(),
        differing=int(differs.sum()),
        max_abs=float(largest.max()) if largest.numel() else 0.0,
        max_relative=float(relative.max()) if relative.numel() else 0.0,
        rows=len(rows),
        prefill_rows=int((rows & ~decode).sum()),
        decode_rows=int((rows & decode).sum()),
    )


def quantized_difference(
    rollout: tuple[torch.Tensor, torch.Tensor], trainer: tuple[torch.Tensor, torch.Tensor], decode: torch.Tensor
) -> Difference:
    """Each (codes (R, K) E4M3, scale (R, K/128) float32): bits are those of codes and scales, sizes those of codes x scale."""
    (codes_a, scale_a), (codes_b, scale_b) = rollout, trainer
    values = difference(_dequantized(codes_a, scale_a), _dequantized(codes_b, scale_b), decode)
    codes = codes_a.view(torch.uint8) != codes_b.view(torch.uint8)
    scales = scale_a.contiguous().view(torch.int32) != scale_b.contiguous().view(torch.int32)
    rows = codes.any(dim=1) | scales.any(dim=1)
    return Difference(
        values=codes.numel() + scales.numel(),
        differing=int(codes.sum()) + int(scales.sum()),
        max_abs=values.max_abs,
        max_relative=values.max_relative,
        rows=len(rows),
        prefill_rows=int((rows & ~decode).sum()),
        decode_rows=int((rows & decode).sum()),
    )


def _dequantized(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    tiles = codes.float().view(codes.shape[0], scale.shape[1], -1)
    return (tiles * scale[:, :, None]).view(codes.shape[0], -1)
