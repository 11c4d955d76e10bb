"""Matrices on which a quantizer that is nearly right differs from one that is right."""

import torch

KINDS = ("normal", "tiny", "huge", "zero", "denormal", "spread", "ties", "nan", "inf")


def matrix(kind: str, m: int, k: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """(m, k) on the CPU. tiny ~1e-7, huge ~1e37, spread: 2**-40..2**40 by row and column, ties: E4M3 midpoints."""
    x = torch.randn(m, k, generator=generator)
    if kind == "tiny":
        x *= 1e-7
    elif kind == "huge":
        x *= 1e37
    elif kind == "zero":
        x = torch.zeros(m, k)
        x[:, ::3] = -0.0
    elif kind == "denormal":
        x *= 2.0**-130
    elif kind == "spread":
        x *= 2.0 ** torch.randint(-40, 41, (m, 1), generator=generator)
        x *= 2.0 ** torch.randint(-40, 41, (1, k), generator=generator)
    elif kind == "ties":
        # amax 448 makes the scale exactly 1, so that odd multiples of half a step fall on rounding boundaries.
        x = torch.randint(-463, 464, (m, k), generator=generator).clamp(-448, 448) / 2.0
        x *= 2.0 ** torch.randint(-16, 1, (m, k), generator=generator)
        x[:, ::64] = 448.0
        x[::64] = 448.0
    elif kind in ("nan", "inf") and x.numel():
        bad = {"nan": float("nan"), "inf": float("inf")}[kind]
        where = torch.randint(0, x.numel(), (3,), generator=generator)
        x.view(-1)[where] = bad * torch.tensor([1.0, -1.0, 1.0])
    return x.to(dtype)
