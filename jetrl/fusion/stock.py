"""Runs a converted model as the Hugging Face model it was, on the same weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def stock_forward(model: nn.Module) -> Iterator[None]:
    """Within this context every converted module of `model` computes what it computed before `convert`.

    For forwards without gradients: FP8 weight codes and fused backwards have no part in it. Works under FSDP, which sees
    the same modules. Raises ValueError where gradients are enabled.
    """
    if torch.is_grad_enabled():
        raise ValueError("stock_forward is for forwards without gradients: enter it under torch.no_grad()")
    converted = [m for m in model.modules() if hasattr(m, "computes_stock")]
    for m in converted:
        m.computes_stock = True
    try:
        yield
    finally:
        for m in converted:
            m.computes_stock = False
