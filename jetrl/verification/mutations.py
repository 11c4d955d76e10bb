"""The self-test: change how one operator of the trainer computes, and see that the comparison names exactly that one.

Each mutation is another legitimate way to compute the same function (a rounding left out, another split of a sum) or a
tiny fault (one weight scale), of the size that a kernel swapped on one engine only would have.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from jetrl.verification.trainer_points import TokenLayout, TrainerObserver, canonical_names

SCALE_FAULT = 1.0 + 2.0**-8


@dataclass(frozen=True)
class Mutation:
    """operator: canonical name of the one that computes otherwise; what: in words."""

    operator: str
    what: str
    kind: str

    def replaced(self, names: list[str], op: str, func: Callable, args: tuple):
        """In a fused layer: the result of `op`, which is the work of operators `names`, or None to leave it alone."""
        if self.operator not in names:
            return None
        if self.kind == "norm" and op in ("rms_norm", "rms_norm_quantize"):
            x, residual, weight, eps = args[:4]
            hidden = x if residual is None else x + residual
            y = norm_in_one_rounding(hidden, weight, eps)
            stock = func(*args)
            return (*_quantized(y, args[4]), *stock[2:]) if op == "rms_norm_quantize" else (y, *stock[1:])
        if self.kind == "silu" and op in ("silu_mul", "silu_mul_quantize"):
            y = silu_mul_in_one_rounding(args[0], args[1])
            return _quantized(y, args[2]) if op == "silu_mul_quantize" else y
        if self.kind == "linear" and op == "gemm_nt":
            return func(*_one_scale_off(args))
        return None


def mutations_of(module: nn.Module) -> list[Mutation]:
    """One of each kind, in the middle decoder layer."""
    layer = f"model.layers.{module.config.num_hidden_layers // 2}"
    return [
        Mutation(f"{layer}.post_attention_layernorm", "rounded once instead of twice", "norm"),
        Mutation(f"{layer}.self_attn.o_proj", "one weight scale off by 1/256, or the sum split in two", "linear"),
        Mutation(f"{layer}.mlp.act_fn", "rounded once, or three times, instead of twice", "silu"),
        Mutation(f"{layer}.self_attn", "keys in two parts, merged after rounding", "attention"),
    ]


def run(module: nn.Module, observe: Callable[[Mutation], TrainerObserver], baseline: TrainerObserver) -> list[dict]:
    """Repeat the fed forward with each mutation. found: the mutated operator's own values changed, and no other's did.

    observe: a fed forward under the mutation. A point's own values are what the trainer computes from the rollout's
    values, so a change at one point does not spread.
    """
    results = []
    for mutation in mutations_of(module):
        with applied(mutation, module, baseline.layout):
            observer = observe(mutation)
        changed = [p for p, mark in observer.prints.items() if mark != baseline.prints[p]]
        named = observer.found[mutation.operator]
        results.append(
            {
                "operator": mutation.operator,
                "what": mutation.what,
                "found": changed == [mutation.operator] and not named.equal,
                "verdict": f"{', '.join(changed) or 'nothing'} changed; {mutation.operator} differs in "
                f"{100 * named.share:.3g} % of values, max relative {named.max_relative:.1e}",
            }
        )
    return results


@contextmanager
def applied(mutation: Mutation, module: nn.Module, layout: TokenLayout) -> Iterator[None]:
    """The mutation where stock modules compute; fused layers ask `replaced`."""
    modules = {name: m for m, name in canonical_names(module)}
    layer = modules[mutation.operator.split(".self_attn")[0].split(".mlp")[0].removesuffix(".post_attention_layernorm")]
    fused = hasattr(layer, "jetrl_steps")
    target = modules[mutation.operator]
    with ExitStack() as stack:
        if mutation.kind == "attention":
            stack.enter_context(_attention_in_parts(target, layout))
        elif not fused:
            target.forward = _STOCK[mutation.kind](target, target.forward)
            stack.callback(lambda: delattr(target, "forward"))
        yield


def norm_in_one_rounding(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def silu_mul_in_one_rounding(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)


def _quantized(y: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.jetrl.quantize_tiles(y.contiguous(), scale_format)


def _one_scale_off(args: tuple) -> tuple:
    a, a_scale, b, b_scale, *rest = args
    b_scale = b_scale.clone()
    b_scale[0, 0] *= SCALE_FAULT
    return (a, a_scale, b, b_scale, *rest)


class _ScaleOff(TorchDispatchMode):
    """Every FP8 product that runs inside sees one weight scale off; `ran` says whether there was one."""

    ran = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "jetrl::gemm_nt":
            self.ran, args = True, _one_scale_off(args)
        return func(*args, **(kwargs or {}))


def _norm(module: nn.Module, stock: Callable) -> Callable:
    eps = module.variance_epsilon
    return lambda x: norm_in_one_rounding(x, module.weight, eps)


def _linear(module: nn.Module, stock: Callable) -> Callable:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with _ScaleOff() as mode:
            y = stock(x)
        if mode.ran:
            return y
        half = x.shape[-1] // 2
        first = nn.functional.linear(x[..., :half], module.weight[:, :half])
        return first + nn.functional.linear(x[..., half:], module.weight[:, half:], module.bias)

    return forward


def _silu(module: nn.Module, stock: Callable) -> Callable:
    return lambda gate: gate * torch.sigmoid(gate)  # the sigmoid is rounded by itself


_STOCK = {"norm": _norm, "linear": _linear, "silu": _silu}


@contextmanager
def _attention_in_parts(target: nn.Module, layout: TokenLayout) -> Iterator[None]:
    name = target.config._attn_implementation
    stock = ALL_ATTENTION_FUNCTIONS[name]

    def attention(module, query, key, value, *args, **kwargs):
        out, weights = stock(module, query, key, value, *args, **kwargs)
        return (_in_parts(query, key, value, out, layout), weights) if module is target else (out, weights)

    ALL_ATTENTION_FUNCTIONS[name] = attention
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS[name] = stock


def _in_parts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, like: torch.Tensor, layout: TokenLayout
) -> torch.Tensor:
    """Causal attention over two halves of the keys; (batch, heads, tokens, D) in, shaped as `like` (batch, tokens, heads, D)."""
    out = like.clone()
    for sequence, length in enumerate(layout.lengths):
        line, start = (0, sum(layout.lengths[:sequence])) if layout.packed else (sequence, 0)
        rows = slice(start, start + length)
        qs, ks, vs = (t[line, :, rows].float() for t in (q, k, v))
        repeat = qs.shape[0] // ks.shape[0]
        ks, vs = ks.repeat_interleave(repeat, 0), vs.repeat_interleave(repeat, 0)
        scores = qs @ ks.transpose(1, 2) * qs.shape[-1] ** -0.5
        scores = scores.masked_fill(
            torch.ones(length, length, device=q.device, dtype=torch.bool).triu(1), float("-inf")
        )
        half, parts = length // 2, []
        for keys in (slice(0, half), slice(half, length)):
            lse = torch.logsumexp(scores[:, :, keys], -1, keepdim=True)
            weights = (scores[:, :, keys] - lse.clamp_min(-1e30)).exp()
            parts.append(((weights @ vs[:, keys]).to(q.dtype).float(), lse))
        total = torch.logaddexp(parts[0][1], parts[1][1])
        merged = sum(y * (lse - total).exp() for y, lse in parts)
        out[line, rows] = merged.transpose(0, 1).to(like.dtype)
    return out
