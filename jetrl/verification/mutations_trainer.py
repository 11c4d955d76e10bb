"""Mutations in the trainer: in stock modules by their forward, in fused layers by the jetrl operators they call."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from jetrl.verification import perturb
from jetrl.verification.mutations import Mutation
from jetrl.verification.trainer_points import TokenLayout, canonical_names

# Who takes the log-softmax, where the flow shares it: the names under which it is called.
_LOG_SOFTMAX = "jetrl.integrations.verl.log_probs"


class Applied:
    """One mutation while it is in force. ran: whether anything was computed otherwise."""

    def __init__(self, mutation: Mutation) -> None:
        self.mutation, self.ran = mutation, False

    def replaced(self, names: list[str], op: str, func: Callable, args: tuple):
        """In a fused layer: the result of `op`, which is the work of operators `names`, or None to leave it alone."""
        mutation = self.mutation
        # A fused layer forms the sum inside the norm that reads it.
        where = f"{mutation.layer}.post_attention_layernorm" if mutation.kind == "residual" else mutation.operator
        if where not in names:
            return None
        change = _FUSED.get((mutation.kind, op))
        if change is None:
            return None
        self.ran = True
        return change(func, args)


@contextmanager
def applied(mutation: Mutation, module: nn.Module, layout: TokenLayout) -> Iterator[Applied]:
    """The mutation in a Hugging Face causal LM; fused layers ask `Applied.replaced`."""
    modules, now = {name: m for m, name in canonical_names(module)}, Applied(mutation)
    with ExitStack() as stack:
        _APPLY[mutation.kind](now, modules, layout, stack)
        yield now


# Stock modules --------------------------------------------------------------------------------------------------------


def _replace_forward(kind: str) -> Callable:
    def apply(now: Applied, modules: dict, layout: TokenLayout, stack: ExitStack) -> None:
        layer, target = modules.get(now.mutation.layer), modules[now.mutation.operator]
        if layer is not None and hasattr(layer, "jetrl_steps"):
            return
        stock = target.forward
        mutated = _STOCK[kind](now, target, stock)

        def forward(*args, **kwargs):
            now.ran = True
            return mutated(*args, **kwargs)

        target.forward = forward
        stack.callback(lambda: delattr(target, "forward"))

    return apply


def _norm(compute: Callable) -> Callable:
    return lambda now, module, stock: lambda x: compute(x, module.weight, module.variance_epsilon)


def _linear(now: Applied, module: nn.Module, stock: Callable) -> Callable:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with OperatorChange("gemm_nt", perturb.one_scale_off) as mode:
            y = stock(x)
        return y if mode.ran else perturb.linear_in_parts(x, module.weight, module.bias)

    return forward


def _quantizer(now: Applied, module: nn.Module, stock: Callable) -> Callable:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with OperatorChange("quantize_tiles", perturb.other_scales) as mode:
            y = stock(x)
        now.ran = mode.ran  # a BF16 layer quantizes nothing
        return y

    return forward


class OperatorChange(TorchDispatchMode):
    """Every call of one jetrl operator inside gets other arguments; `ran` says whether there was one."""

    def __init__(self, name: str, change: Callable[[tuple], tuple]) -> None:
        super().__init__()
        self.name, self.change, self.ran = f"jetrl::{name}", change, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == self.name:
            self.ran, args = True, self.change(args)
        return func(*args, **(kwargs or {}))


_STOCK = {
    "norm": _norm(perturb.norm_in_one_rounding),
    "norm_parts": _norm(perturb.norm_in_parts),
    "linear": _linear,
    "quantizer": _quantizer,
    "silu": lambda now, module, stock: lambda gate: gate * torch.sigmoid(gate),  # the sigmoid is rounded by itself
    "head": lambda now, module, stock: lambda x: perturb.linear_in_parts(x, module.weight, module.bias),
}


def _residual(now: Applied, modules: dict, layout: TokenLayout, stack: ExitStack) -> None:
    if hasattr(modules[now.mutation.layer], "jetrl_steps"):
        return
    norm = modules[f"{now.mutation.layer}.post_attention_layernorm"]

    def before(module: nn.Module, args: tuple) -> None:
        now.ran = True
        args[0].copy_(perturb.one_place_off(args[0]))  # the stream itself, which is read again behind the norm

    stack.callback(norm.register_forward_pre_hook(before).remove)


def _table(now: Applied, modules: dict, layout: TokenLayout, stack: ExitStack) -> None:
    def after(module: nn.Module, args: tuple, out: tuple[torch.Tensor, torch.Tensor]):
        now.ran = True
        cos = out[0].clone()
        cos[:, 3, [0, cos.shape[-1] // 2]] *= perturb.BF16_FAULT  # both halves of a head read the same cosine
        return cos, out[1]

    stack.callback(modules[now.mutation.operator].register_forward_hook(after).remove)


def _rotary(now: Applied, modules: dict, layout: TokenLayout, stack: ExitStack) -> None:
    target = modules[now.mutation.operator.removesuffix(".rotary")]
    if hasattr(modules[now.mutation.layer], "jetrl_steps"):
        return
    code, stock = sys.modules[type(target).__module__], target.forward

    def once(q, k, cos, sin, unsqueeze_dim=1):
        now.ran, half = True, cos.shape[-1] // 2
        halves = [t[..., :half].unsqueeze(unsqueeze_dim) for t in (cos, sin)]
        return tuple(perturb.rotary_in_one_rounding(x, *halves) for x in (q, k))

    def forward(*args, **kwargs):
        eager = code.apply_rotary_pos_emb
        code.apply_rotary_pos_emb = once
        try:
            return stock(*args, **kwargs)
        finally:
            code.apply_rotary_pos_emb = eager

    target.forward = forward
    stack.callback(lambda: delattr(target, "forward"))


def _attention(now: Applied, modules: dict, layout: TokenLayout, stack: ExitStack) -> None:
    target = modules[now.mutation.operator]
    name = target.config._attn_implementation
    stock = ALL_ATTENTION_FUNCTIONS[name]

    def attention(module, query, key, value, *args, **kwargs):
        out, weights = stock(module, query, key, value, *args, **kwargs)
        if module is not target:
            return out, weights
        now.ran = True
        return _in_parts(query, key, value, out, layout), weights

    ALL_ATTENTION_FUNCTIONS[name] = attention
    stack.callback(lambda: ALL_ATTENTION_FUNCTIONS.__setitem__(name, stock))


def _in_parts(q, k, v, like: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
    """Causal; (batch, heads, tokens, D) in, shaped as `like` (batch, tokens, heads, D)."""
    out = like.clone()
    for sequence, length in enumerate(layout.lengths):
        line, start = (0, sum(layout.lengths[:sequence])) if layout.packed else (sequence, 0)
        rows, seen = slice(start, start + length), torch.arange(1, length + 1)
        qs, ks, vs = (t[line, :, rows].transpose(0, 1) for t in (q, k, v))
        out[line, rows] = perturb.attention_in_parts(qs, ks, vs, seen, q.shape[-1] ** -0.5).to(like.dtype)
    return out


def _log_softmax(change: Callable) -> Callable:
    """change(stock, logits, ids, temperature, vocab)."""

    def apply(now: Applied, modules: dict, layout: TokenLayout, stack: ExitStack) -> None:
        caller = sys.modules.get(_LOG_SOFTMAX)
        if caller is None:
            return
        stock = caller.token_logprobs

        def mutated(*args):
            now.ran = True
            return change(stock, *args)

        caller.token_logprobs = mutated
        stack.callback(lambda: setattr(caller, "token_logprobs", stock))

    return apply


_APPLY = {
    **{kind: _replace_forward(kind) for kind in _STOCK},
    "residual": _residual,
    "table": _table,
    "rotary": _rotary,
    "attention": _attention,
    "log_softmax": _log_softmax(lambda stock, *args: perturb.log_probs_in_parts(*args)),
    "temperature": _log_softmax(lambda stock, x, ids, t, vocab: stock(x, ids, t * perturb.FAULT, vocab)),
    "mask": _log_softmax(lambda stock, x, ids, t, vocab: stock(x, ids, t, vocab // 2)),
}


# Fused layers ---------------------------------------------------------------------------------------------------------


def _quantized(y: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.jetrl.quantize_tiles(y.contiguous(), scale_format)


def _fused_norm(compute: Callable, quantizes: bool) -> Callable:
    def change(func: Callable, args: tuple):
        x, residual, weight, eps = args[:4]
        y, stock = compute(x if residual is None else x + residual, weight, eps), func(*args)
        return (*_quantized(y, args[4]), *stock[2:]) if quantizes else (y, *stock[1:])

    return change


def _fused_residual(func: Callable, args: tuple):
    x, residual, *rest = args
    hidden = perturb.one_place_off(x + residual)
    *out, _, rstd = func(hidden, None, *rest)
    return (*out, hidden, rstd)


def _fused_q_norm(func: Callable, args: tuple):
    q, k, q_weight, k_weight, eps, cos, sin, positions = args
    rstd = perturb.rstd_in_parts(q, eps)
    _, k_out, _, k_rstd = func(*args)
    q_out, _ = torch.ops.jetrl.rotary(perturb.normed(q, rstd, q_weight), k, cos, sin, positions, False)
    return q_out, k_out, rstd.squeeze(-1), k_rstd


def _fused_qk_rotary(func: Callable, args: tuple):
    q, k, q_weight, k_weight, eps, cos, sin, positions = args
    _, _, q_rstd, k_rstd = func(*args)
    parts = [perturb.normed(q, q_rstd.unsqueeze(-1), q_weight), perturb.normed(k, k_rstd.unsqueeze(-1), k_weight)]
    return (*_rotated(*parts, cos, sin, positions), q_rstd, k_rstd)


def _rotated(q, k, cos, sin, positions) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [(t if positions is None else t[positions]).unsqueeze(1) for t in (cos, sin)]
    return tuple(perturb.rotary_in_one_rounding(x, *rows) for x in (q, k))


_FUSED = {
    ("norm", "rms_norm"): _fused_norm(perturb.norm_in_one_rounding, False),
    ("norm", "rms_norm_quantize"): _fused_norm(perturb.norm_in_one_rounding, True),
    ("norm_parts", "rms_norm"): _fused_norm(perturb.norm_in_parts, False),
    ("norm_parts", "rms_norm_quantize"): _fused_norm(perturb.norm_in_parts, True),
    ("norm_parts", "qk_norm_rotary"): _fused_q_norm,
    ("residual", "rms_norm"): _fused_residual,
    ("residual", "rms_norm_quantize"): _fused_residual,
    ("rotary", "qk_norm_rotary"): _fused_qk_rotary,
    ("rotary", "rotary"): lambda func, args: _rotated(*args[:5]),
    ("silu", "silu_mul"): lambda func, args: perturb.silu_mul_in_one_rounding(*args),
    ("silu", "silu_mul_quantize"): lambda func, args: _quantized(perturb.silu_mul_in_one_rounding(*args[:2]), args[2]),
    ("linear", "gemm_nt"): lambda func, args: func(*perturb.one_scale_off(args)),
    ("quantizer", "quantize_tiles"): lambda func, args: func(*perturb.other_scales(args)),
}
