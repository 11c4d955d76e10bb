"""The fused decoder layer: a Hugging Face layer of known form whose forward is three steps with attention in the middle.

The layer's class is replaced by a subclass of it with the same name (wrap policies and `_no_split_modules` go by name);
children, parameters, checkpointing and the layer's own hooks stay. The children are read, not called.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from jetrl.errors import UserError
from jetrl.fusion.attention_input import AttentionInput
from jetrl.fusion.attention_output import AttentionOutput
from jetrl.fusion.projection import Projection
from jetrl.fusion.trace import scope
from jetrl.weight_cache import CachePolicy

# Children of a layer that its fused forward replaces; a hook on one would never run.
CHILDREN = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Steps:
    """The two fused steps of one layer."""

    before: AttentionInput
    after: AttentionOutput

    @classmethod
    def of(cls, layer: nn.Module, policy: CachePolicy) -> "Steps":
        attention, mlp = layer.self_attn, layer.mlp
        head_norms = hasattr(attention, "q_norm")
        before = AttentionInput(
            qkv=Projection.of([getattr(attention, n) for n in ATTENTION[:3]], policy),
            head_dim=attention.head_dim,
            head_norms=head_norms,
            eps=layer.input_layernorm.variance_epsilon,
            head_eps=attention.q_norm.variance_epsilon if head_norms else 0.0,
        )
        after = AttentionOutput(
            o=Projection.of([attention.o_proj], policy),
            gate_up=Projection.of([mlp.gate_proj, mlp.up_proj], policy),
            down=Projection.of([mlp.down_proj], policy),
            eps=layer.post_attention_layernorm.variance_epsilon,
        )
        return cls(before, after)


def fused_forward(
    self,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.LongTensor | None = None,
    past_key_values=None,
    use_cache: bool | None = False,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **kwargs,
) -> torch.Tensor:
    """What the stock layer's forward takes and returns: hidden_states (batch, sequence, K) in, the same out."""
    if self.computes_stock:
        stock = {"past_key_values": past_key_values, "use_cache": use_cache, "position_embeddings": position_embeddings}
        return self.stock_class.forward(self, hidden_states, attention_mask, position_ids, **stock, **kwargs)
    _refuse_wrapped_children(self)
    steps, attention, mlp = self.jetrl_steps, self.self_attn, self.mlp
    batch, length, width = hidden_states.shape
    cos, sin = (_half(t, batch, attention.head_dim) for t in position_embeddings)
    qkv = [getattr(attention, name) for name in ATTENTION[:3]]
    norms = [getattr(attention, name).weight for name in HEAD_NORMS] if steps.before.head_norms else [None, None]
    q, k, v, hidden = steps.before(
        hidden_states.reshape(-1, width),
        self.input_layernorm.weight,
        norms,
        cos,
        sin,
        [m.weight for m in qkv],
        [m.bias for m in qkv],
    )
    # (batch, heads, sequence, D), as attention functions of transformers take them.
    q, k, v = (t.unflatten(0, (batch, length)).transpose(1, 2) for t in (q, k, v))
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, attention.layer_idx)
    extra = {"sliding_window": attention.sliding_window} if hasattr(attention, "sliding_window") else {}
    with scope("self_attn"):
        out, _ = attention_function(attention)(
            attention,
            q,
            k,
            v,
            attention_mask,
            dropout=0.0,
            scaling=attention.scaling,
            position_ids=position_ids,
            use_cache=use_cache,
            **extra,
            **kwargs,
        )
    o = attention.o_proj
    hidden = steps.after(
        out.reshape(batch * length, attention.o_proj.in_features),
        hidden,
        o.weight,
        o.bias,
        self.post_attention_layernorm.weight,
        mlp.gate_proj.weight,
        mlp.up_proj.weight,
        mlp.down_proj.weight,
    )
    return hidden.view(batch, length, width)


def attention_function(attention: nn.Module) -> Callable:
    """By name from transformers' registry; "eager" is the function in the model's own module."""
    eager = getattr(sys.modules[type(attention).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, eager)


def _half(table: torch.Tensor, batch: int, head_dim: int) -> torch.Tensor:
    """cos or sin (1 or batch, sequence, D), whose halves are equal, as (tokens, D / 2)."""
    if table.shape[-1] != head_dim:
        raise UserError(
            f"this model rotates {table.shape[-1]} of {head_dim} elements of a head, which the fused trainer does not do; "
            f"use precision=bf16"
        )
    return table.expand(batch, -1, -1).reshape(-1, head_dim)[:, : head_dim // 2]


def _refuse_wrapped_children(layer: nn.Module) -> None:
    """A child with hooks, or under FSDP by itself, expects to be called: its weights may not even be here otherwise."""
    if not any(layer.jetrl_hooks) and all(p._modules[name] is child for p, name, child in layer.jetrl_parts):
        return
    raise UserError(
        "a module inside a fused decoder layer is wrapped or has a hook, and would be passed over; wrap whole decoder layers "
        "(actor.fsdp_config.wrap_policy), or keep the layer unfused with convert(..., fuse_layers=False)"
    )


_classes: dict[type, type] = {}


def swap_layer(layer: nn.Module, policy: CachePolicy) -> None:
    """Give `layer`, whose form recognise.py has checked and whose linears are Float8Linear, its fused forward."""
    stock = type(layer)
    if stock not in _classes:
        members = {
            "stock_class": stock,
            "forward": fused_forward,
            "computes_stock": False,
            "__module__": stock.__module__,
        }
        _classes[stock] = type(stock.__name__, (stock,), members)
    layer.__class__ = _classes[stock]
    layer.jetrl_steps = Steps.of(layer, policy)
    # A wrapper takes a part's place in its parent, and passes attribute reads on: nothing else would tell.
    layer.jetrl_parts = tuple((p, name, child) for p in layer.modules() for name, child in p.named_children())
    layer.jetrl_hooks = hook_tables(m for name, m in layer.named_modules() if name)


def hook_tables(modules: Sequence[nn.Module]) -> tuple[dict, ...]:
    return tuple(
        table
        for m in modules
        for table in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
    )
