"""Which decoder layers can be fused: those of the known form that also compute what the fused layer computes.

The form is read off the modules, as the precision graph reads it. Layers of one form can still differ in their arithmetic
(a scaled residual, another norm, rotary pairs in another order), so a small layer of the same class is built and its output
compared with that of the composition below. No model is known by its name.
"""

import copy
import inspect
import sys
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from jetrl.fusion.layer import ATTENTION, CHILDREN, HEAD_NORMS, MLP, attention_function, hook_tables
from jetrl.linear import Float8Linear
from jetrl.precision.hf_parts import is_norm

SMALL = {
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_hidden_layers": 1,
}
# Two float32 computations of one formula over sums of at most 96 terms; another formula is off by far more.
TOLERANCE = 1e-4
# The attention that a small layer calls by this name notes what it is given.
RECORDER = "jetrl_recognise"
# What the fused layer passes on as well: the composition's own, and what the model gives every layer.
SHARED_OPTIONS = ("scaling", "dropout", "attention_mask", "position_ids", "use_cache")

_verdicts: dict[tuple, str | None] = {}


def why_not_fused(layer: nn.Module, config) -> str | None:
    """None where `layer` (a decoder layer with a `self_attn`) can be fused, else the reason, as the end of a sentence."""
    return _form(layer) or _formats(layer) or _arithmetic(layer, config)


def why_norm_not_shared(norm: nn.Module) -> str | None:
    """None where `norm` (see hf_parts.is_norm; its weight may be on the meta device) computes what jetrl.rms_norm does."""
    eps = getattr(norm, "variance_epsilon", None)
    if not isinstance(eps, float):
        return "it has no variance_epsilon"
    if len(inspect.signature(type(norm).forward).parameters) != 2:
        return "its forward takes more than one tensor"
    twin = copy.copy(norm)
    generator = torch.Generator("cpu").manual_seed(0)
    weight, x = (torch.randn(n, norm.weight.shape[0], generator=generator) for n in (1, 5))
    twin._parameters = {"weight": nn.Parameter(weight[0], requires_grad=False)}
    with torch.device("cpu"), torch.no_grad():
        stock = type(norm).forward(twin, x)
    return (
        None
        if torch.allclose(stock, _normed(x, twin), rtol=TOLERANCE, atol=TOLERANCE)
        else "it computes something else"
    )


def _form(layer: nn.Module) -> str | None:
    if not set(dict(layer.named_children())) == set(CHILDREN):
        return "the layer has other parts than norm, attention, norm and MLP"
    attention, mlp = layer.self_attn, layer.mlp
    names = set(dict(attention.named_children()))
    if names not in (set(ATTENTION), {*ATTENTION, *HEAD_NORMS}):
        return "its attention has other parts than q, k, v, o and their norms"
    if set(dict(mlp.named_children())) != {*MLP, "act_fn"}:
        return "its MLP has other parts than gate, up and down"
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, n) for n in HEAD_NORMS if n in names]
    if not all(is_norm(n) and isinstance(getattr(n, "variance_epsilon", None), float) for n in norms):
        return "a norm is no RMS norm"
    if len({n.variance_epsilon for n in norms[2:]}) > 1:
        return "its q and k norms have different epsilons"
    if any(getattr(mlp, n).bias is not None for n in MLP):
        return "its MLP has biases"
    if getattr(attention, "attention_dropout", 0.0):
        return "it has attention dropout"
    if any(hook_tables(m for name, m in layer.named_modules() if name)):
        return "a module inside it has hooks"
    return None


def _formats(layer: nn.Module) -> str | None:
    linears = [getattr(layer.self_attn, n) for n in ATTENTION] + [getattr(layer.mlp, n) for n in MLP]
    if not all(isinstance(m, Float8Linear) for m in linears):
        return "not all of its linear layers run in FP8"
    if len({m.format for m in linears}) > 1:
        return "its linear layers have different formats"
    return None


def _arithmetic(layer: nn.Module, config) -> str | None:
    """Compare a small layer of this class with `_composition`. The verdict is kept per class, place and configuration.

    By place, because layers of one class can differ: some models leave the rotary embedding out of every fourth.
    """
    index = getattr(layer.self_attn, "layer_idx", 0)
    key = (type(layer), index, repr(config))
    if key not in _verdicts:
        _verdicts[key] = _compare(type(layer), index, config)
    return _verdicts[key]


def _compare(cls: type, index: int, config) -> str | None:
    small = copy.deepcopy(config)
    for name, value in SMALL.items():
        setattr(small, name, value)
    small._attn_implementation = "eager"
    # The caller's random state is part of a resumable job. torch.manual_seed would seed the GPUs too, which fork_rng
    # does not put back: the optimizer's rounding would start from this seed in the first engine of a process, and from
    # the job's own in later ones, which find the verdict kept.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.default_generator.manual_seed(0)
        try:
            layer = cls(small, index).to(torch.float32).eval()
        except (TypeError, AttributeError, KeyError, ValueError, RuntimeError) as e:
            return f"a small layer of its class could not be built ({type(e).__name__})"
        if _form(layer) is not None:
            return "a small layer of its class has another form"
        for p in layer.parameters():
            p.normal_(std=0.5)
        hidden, angle = torch.randn(2, 5, SMALL["hidden_size"]), torch.randn(2, 5, SMALL["head_dim"] // 2)
        tables = tuple(torch.cat((t, t), dim=-1) for t in (angle.cos(), angle.sin()))
        passed: dict = {}
        ALL_ATTENTION_FUNCTIONS[RECORDER] = partial(_record, passed)
        small._attn_implementation = RECORDER
        try:
            stock = layer(hidden, attention_mask=None, position_embeddings=tables)
        finally:
            small._attn_implementation = "eager"
            del ALL_ATTENTION_FUNCTIONS[RECORDER]
        ours = _composition(layer, hidden, *tables)
    if not isinstance(stock, torch.Tensor) or not torch.allclose(
        stock, ours, rtol=TOLERANCE, atol=TOLERANCE * stock.abs().max()
    ):
        return "a small layer of its class computes something else"
    # Eager attention ignores these and other kernels do not: no output of a small layer would show them.
    ours = {"sliding_window": getattr(layer.self_attn, "sliding_window", None)}
    stray = sorted(key for key in {*passed, *ours} if passed.get(key) != ours.get(key))
    return f"its attention is given a {stray[0]} that is not the attention module's own" if stray else None


def _record(passed: dict, module: nn.Module, *qkv_mask, **options):
    """Eager attention that notes which options the layer gave it."""
    passed.update({key: value for key, value in options.items() if key not in SHARED_OPTIONS})
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, *qkv_mask, **options)


def _normed(x: torch.Tensor, norm: nn.Module) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon) * norm.weight


def _composition(layer: nn.Module, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The fused layer's formula in plain torch, without quantization."""
    attention, mlp, d = layer.self_attn, layer.mlp, layer.self_attn.head_dim

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]

    x = _normed(hidden, layer.input_layernorm)
    q, k, v = (getattr(attention, n)(x).unflatten(-1, (-1, d)) for n in ATTENTION[:3])
    if hasattr(attention, "q_norm"):
        q, k = _normed(q, attention.q_norm), _normed(k, attention.k_norm)
    q, k, v = rotated(q.transpose(1, 2)), rotated(k.transpose(1, 2)), v.transpose(1, 2)
    out, _ = attention_function(attention)(attention, q, k, v, None, scaling=attention.scaling, dropout=0.0)
    hidden = hidden + attention.o_proj(out.flatten(2))
    x = _normed(hidden, layer.post_attention_layernorm)
    return hidden + mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
