"""The shadow pass: the converted model's own weights, forward, as the unconverted BF16 model computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType

import torch
from torch import nn

from jetrl.fusion import layer as fused_layer
from jetrl.fusion import norm as fused_norm
from jetrl.linear import Float8Linear


@contextmanager
def stock_forward(model: nn.Module) -> Iterator[int]:
    """Inside, every swapped module of `model` computes as its stock class; yields how many were. Without gradients only.

    Nothing is copied. The forward is set on the module objects and not by swapping classes back, because FSDP2 puts a class
    of its own on top of ours; its hooks and FSDP1's wrappers call `module.forward` whatever it is.
    """
    swapped = {module: stock for module in model.modules() if (stock := _stock_class(module)) is not None}
    for module, stock in swapped.items():
        module.forward = MethodType(stock.forward, module)
    try:
        with torch.no_grad():
            yield len(swapped)
    finally:
        for module in swapped:
            del module.forward


def _stock_class(module: nn.Module) -> type | None:
    """The Hugging Face or torch class below jetrl's, None where the module is not swapped.

    A module with a forward of its own on the object was patched by somebody else: that stays.
    """
    if "forward" in vars(module):
        return None
    ours = {Float8Linear, *fused_norm._classes.values(), *fused_layer._classes.values()}
    return next((cls.__bases__[0] for cls in type(module).__mro__ if cls in ours), None)
