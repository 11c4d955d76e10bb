"""One table of cos and sin for both engines, from the model's configuration alone.

Stock engines compute their own, vLLM on the GPU for all positions at once and Hugging Face for each batch; the two differ in
the last bit of a float32 here and there, and after rounding to BF16 in a few values among thousands. Here frequencies and
angles are Hugging Face's float32 formulas on the CPU, where products and quotients are IEEE; the cosine is taken in
float64, so that its float32 value does not depend on a math library.
"""

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jetrl.errors import UserError
from jetrl.precision.hf_parts import is_rotary

# Frequencies of these do not depend on the length of the sequence at hand.
STATIC_TYPES = ("default", "linear", "llama3", "yarn")


def rotary_table(hf_config: object, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin (rows, R / 2), float32 on the CPU, for positions 0 to rows - 1, scaled as the configuration says.

    Raises UserError for a type of rotary embedding whose frequencies depend on the sequence.
    """
    with torch.device("cpu"):  # vLLM builds models with the GPU as the default
        frequencies, scaling = _frequencies(hf_config)
        angles = (torch.arange(rows, dtype=torch.float32)[:, None] * frequencies).to(torch.float64)
    return angles.cos().to(torch.float32) * scaling, angles.sin().to(torch.float32) * scaling


def _frequencies(hf_config: object) -> tuple[torch.Tensor, float]:
    parameters = getattr(hf_config, "rope_parameters", None) or {}
    kind = parameters.get("rope_type", "default")
    if kind not in STATIC_TYPES or "rope_theta" not in parameters:
        raise UserError(
            f"rotary embeddings of type {kind} have no table that both engines can share; precision=unified_exact takes "
            f"{', '.join(STATIC_TYPES)}: use precision=unified_fp8"
        )
    if kind != "default":
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
        return frequencies.to(torch.float32), scaling
    size = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    rotated = int(size * parameters.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64).to(torch.float32) / rotated
    return 1.0 / (parameters["rope_theta"] ** exponents), 1.0


class RotaryTable:
    """The table on whatever device and dtype it is asked for; copies are plain attributes, never checkpointed."""

    def __init__(self, hf_config: object) -> None:
        self.tables = rotary_table(hf_config, hf_config.max_position_embeddings)
        self._copies: dict[tuple, tuple[torch.Tensor, ...]] = {}

    def on(self, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        key = (str(device), dtype)
        if key not in self._copies:
            self._copies[key] = tuple(t.to(device=device, dtype=dtype) for t in self.tables)
        return self._copies[key]


_classes: dict[type, type] = {}


def share_rotary_table(model: nn.Module) -> int:
    """Make the rotary modules of a Hugging Face model look cos and sin up in the shared table. Returns how many there are.

    Their class is replaced by a subclass of it with the same name; what they return is as before: cos and sin
    (batch, tokens, R) in the dtype of the hidden states, both halves equal.
    """
    found = [module for module in model.modules() if is_rotary(module)]
    table = RotaryTable(model.config) if found else None
    for module in found:
        stock = type(module)
        if stock not in _classes:
            body = {"forward": _look_up, "__module__": stock.__module__}
            _classes[stock] = type(stock.__name__, (stock,), body)
        module.__class__ = _classes[stock]
        module.jetrl_table = table
    return len(found)


@torch.no_grad()
def _look_up(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(
        torch.cat((t, t), dim=-1) for t in (table[position_ids] for table in self.jetrl_table.on(x.device, x.dtype))
    )
