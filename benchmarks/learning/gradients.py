"""Direction and size of every parameter's gradient under each variant against a float32 forward and backward.

The reference has float32 activations and gradients (no TF32) and the same bf16-rounded weights, on the same batch.
"""

import torch

from .model import NUDGED, VARIANTS, Size, build, loss


def _of(size: Size, length: int, variant: str, weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> dict:
    model = build(size, length, variant, weights, tokens.device.type)
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss(model, tokens), parameters)
    return {name: grad.float() for name, grad in zip(names, found, strict=True)}


def compare(size: Size, length: int, weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> dict[str, dict]:
    """{variant: {parameter: {"cosine": c, "norm_ratio": norm over float32's}}}; tokens (rows, length + 1) on the device.

    "all" stands for all parameters as one vector.
    """
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        exact = _of(size, length, "fp32", weights, tokens)
        return {
            variant: _measure(_of(size, length, variant, weights, tokens), exact)
            for variant in VARIANTS
            if variant != NUDGED
        }
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def _measure(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, dict[str, float]]:
    result, sums = {}, torch.zeros(3, dtype=torch.float64)
    for name, reference in exact.items():
        a, b = found[name].double().flatten(), reference.double().flatten()
        products = torch.stack((a @ b, a @ a, b @ b)).cpu()
        result[name], sums = _ratios(products), sums + products
    return result | {"all": _ratios(sums)}


def _ratios(products: torch.Tensor) -> dict[str, float]:
    dot, own, reference = products.tolist()
    return {"cosine": dot / (own * reference) ** 0.5, "norm_ratio": (own / reference) ** 0.5}
