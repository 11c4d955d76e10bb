"""One or several linear layers over the same input as one GEMM per pass.

Every logical matrix starts at a multiple of 128 rows of the merged weight, so its blocks, and the bits of its outputs, are
those of its own GEMM. In the backward the parts are contracted together: dx is summed over all of them in FP32.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jetrl_kernels.constants import pad_to_tile

from jetrl.precision.formats import LinearFormat
from jetrl.weight_cache import CachePolicy, WeightCodes
from jetrl.wgrad import CARRIER_DTYPES, Kept, Operand, weight_gradient


@dataclass(frozen=True)
class Projection:
    """sizes: out_features of every matrix; in_features: theirs all; codes: of the merged weight."""

    sizes: tuple[int, ...]
    in_features: int
    format: LinearFormat
    codes: WeightCodes

    @classmethod
    def of(cls, modules: Sequence[torch.nn.Linear], policy: CachePolicy) -> "Projection":
        fmt = modules[0].format
        sizes = tuple(m.out_features for m in modules)
        return cls(sizes, modules[0].in_features, fmt, WeightCodes(fmt.weight.scale_format, policy))

    @property
    def starts(self) -> tuple[int, ...]:
        """First column of every part in a merged output or gradient."""
        starts, at = [], 0
        for n in self.sizes:
            starts.append(at)
            at += pad_to_tile(n)
        return tuple(starts)

    def fprop(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """(M, sum of padded sizes) in dtype; a product is rounded before its bias is added."""
        y = torch.ops.jetrl.gemm_nt(codes, scale, *self.codes.for_fprop(weights), CARRIER_DTYPES[dtype])
        for part, bias in zip(self.parts(y), biases, strict=True):
            if bias is not None:
                part += bias.to(dtype)
        return y

    def dgrad(self, dy: Operand, weights: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """(M, in_features): dy in tiles along the merged columns."""
        dx = torch.ops.jetrl.gemm_nt(*dy, *self.codes.for_dgrad(weights), CARRIER_DTYPES[dtype])
        return dx if dx.shape[1] == self.in_features else dx[:, : self.in_features].contiguous()

    def wgrad(self, dy: Kept, kept: Kept, dtype: torch.dtype) -> list[torch.Tensor]:
        """The gradient (N_i, in_features) of every matrix: row ranges of one tensor."""
        merged = weight_gradient(dy, kept, self.in_features, self.format, dtype)
        return [merged[at : at + n] for at, n in zip(self.starts, self.sizes, strict=True)]

    def parts(self, merged: torch.Tensor) -> list[torch.Tensor]:
        """Views of every part's columns."""
        return [merged[:, at : at + n] for at, n in zip(self.starts, self.sizes, strict=True)]

    def bias_gradients(self, merged: torch.Tensor, biases: Sequence[torch.dtype | None]) -> list[torch.Tensor | None]:
        """Sums over tokens in FP32, in the dtypes given; None where a part has no bias."""
        return [
            None if dtype is None else part.sum(dim=0, dtype=torch.float32).to(dtype)
            for part, dtype in zip(self.parts(merged), biases, strict=True)
        ]
