"""Points of a forward at which both engines can be compared, under canonical names, and the tensors seen there.

A point is an operator's output: `model.layers.3.mlp.down_proj`, or `model.layers.3.self_attn.rotary#q` where an operator
has two. Rows are tokens: (sequence, position), the position being that of the input token.
"""

import re
from dataclasses import dataclass, field

import torch

# Inside one decoder layer, in the order of execution.
LAYER_POINTS = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "self_attn.rotary#q",
    "self_attn.rotary#k",
    "self_attn",
    "self_attn.o_proj",
    "self_attn.residual_add",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.act_fn",
    "mlp.down_proj",
    "mlp.residual_add",
)
EMBEDDING, FINAL_NORM, LM_HEAD, LOG_SOFTMAX = "model.embed_tokens", "model.norm", "lm_head", "log_softmax"
ROTARY_TABLE = "model.rotary_emb"  # cos and sin of a token's position, side by side
TITLES = {
    "embed_tokens": "embedding",
    "rotary_emb": "rotary table",
    "input_layernorm": "norm",
    "post_attention_layernorm": "norm",
    "norm": "norm",
    "q_norm": "q norm",
    "k_norm": "k norm",
    "rotary#q": "rotary, q",
    "rotary#k": "rotary, k",
    "self_attn": "attention output",
    "residual_add": "residual add",
    "act_fn": "SiLU-mul",
    "log_softmax": "log-softmax",
}
_LAYER = re.compile(r"(model\.layers\.(\d+))\.(.+)")


def point_order(layers: int) -> list[str]:
    """Every point a model of so many layers may have, in the order of execution."""
    inside = [f"model.layers.{i}.{name}" for i in range(layers) for name in LAYER_POINTS]
    return [EMBEDDING, ROTARY_TABLE, *inside, FINAL_NORM, LM_HEAD, LOG_SOFTMAX]


def operator_of(point: str) -> str:
    return point.partition("#")[0]


def kind_of(point: str) -> str:
    """The point without its layer number: what the same operator is called in every layer."""
    match = _LAYER.fullmatch(point)
    return match[3] if match else point


def layer_of(point: str) -> int | None:
    match = _LAYER.fullmatch(point)
    return int(match[2]) if match else None


def title_of(point: str) -> str:
    leaf = point.rpartition(".")[2]
    return TITLES.get(leaf, f"{leaf} output")


@dataclass
class PointRows:
    """What one engine had at one point. index (R, 2) int64: sequence, position; data (R, features); phase (R,) bool,
    true where the row was computed in a decode step of the rollout."""

    index: torch.Tensor
    data: torch.Tensor
    decode: torch.Tensor


@dataclass
class PointStore:
    """Collects rows point by point, on the CPU."""

    parts: dict[str, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = field(default_factory=dict)

    def add(self, point: str, index: torch.Tensor, data: torch.Tensor, decode: torch.Tensor) -> None:
        self.parts.setdefault(point, []).append((index, data.detach().to("cpu", copy=True), decode))

    def finish(self) -> dict[str, PointRows]:
        return {
            point: PointRows(*(torch.cat(t) for t in zip(*parts, strict=True))) for point, parts in self.parts.items()
        }
