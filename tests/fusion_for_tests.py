"""A fused model, and the same operators one by one.

On the GPU where there is one (the kernels), else on the CPU (their references).
"""

import torch
from checkpoints_for_tests import VOCAB, build_model

from jetrl.convert import convert
from jetrl.fusion.layer import attention_function
from jetrl.fusion.norm import rms_norm
from jetrl.linear import fp8_linear
from jetrl.precision.build_hf import build_training_graph
from jetrl.precision.flow import PrecisionAssignment
from jetrl.precision.formats import BF16, FP32

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def assignment(**changes) -> PrecisionAssignment:
    return PrecisionAssignment(**{"linear": "fp8", **changes})


def build(architecture, dtype=torch.bfloat16, cache="micro_batch", fuse=True, **changes):
    model = build_model(architecture).to(dtype).to(DEVICE)
    model.config._attn_implementation = "sdpa"
    graph = build_training_graph(model, assignment(**changes), carrier=BF16 if dtype == torch.bfloat16 else FP32)
    report = convert(model, graph, weight_cache=cache, fuse_layers=fuse)
    return model, report


def tokens(rows=2, length=37, seed=0):
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def one_by_one(model, ids):
    """The model's logits from jetrl's operators, each by itself: every linear quantizes its own input."""
    hidden = model.model.embed_tokens(ids)
    cos, sin = model.model.rotary_emb(hidden, torch.arange(ids.shape[1], device=ids.device)[None])
    for layer in model.model.layers:
        hidden = one_layer(layer, hidden, cos, sin)
    return model.lm_head(rms_norm(hidden, model.model.norm.weight, model.model.norm.variance_epsilon))


def one_layer(layer, hidden, cos, sin):
    attention, mlp = layer.self_attn, layer.mlp
    batch, length, d = *hidden.shape[:2], attention.head_dim
    half = [t.expand(batch, -1, -1).reshape(-1, d)[:, : d // 2] for t in (cos, sin)]

    def linear(module, x):
        return fp8_linear(x, module.weight, module.bias, module.format)

    def norm(module, x):
        return rms_norm(x, module.weight, module.variance_epsilon)

    x = norm(layer.input_layernorm, hidden)
    q, k, v = (linear(getattr(attention, n), x).view(-1, linear_heads(attention, n), d) for n in ATTENTION[:3])
    if hasattr(attention, "q_norm"):
        q, k = norm(attention.q_norm, q), norm(attention.k_norm, k)
    q, k = Rotary.apply(q.contiguous(), k.contiguous(), *half)
    q, k, v = (t.unflatten(0, (batch, length)).transpose(1, 2) for t in (q, k, v))
    out, _ = attention_function(attention)(attention, q, k, v, None, dropout=0.0, scaling=attention.scaling)
    hidden = hidden + linear(attention.o_proj, out.reshape(batch, length, -1))
    x = norm(layer.post_attention_layernorm, hidden)
    gate, up = linear(mlp.gate_proj, x).flatten(0, 1), linear(mlp.up_proj, x).flatten(0, 1)
    return hidden + linear(mlp.down_proj, SiluMul.apply(gate, up).view(batch, length, -1))


def linear_heads(attention, name):
    return getattr(attention, name).out_features // attention.head_dim


class Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return torch.ops.jetrl.rotary(q, k, cos, sin, None, False)

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        return *torch.ops.jetrl.rotary(dq.contiguous(), dk.contiguous(), cos, sin, None, True), None, None


class SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return torch.ops.jetrl.silu_mul(gate, up)

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        merged = torch.ops.jetrl.silu_mul_backward(grad.contiguous(), gate, up)
        n = merged.shape[1] // 2
        return merged[:, : gate.shape[1]], merged[:, n : n + gate.shape[1]]


def gradients(logits, ids, model):
    model.zero_grad()
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def relative(a, b):
    return ((a - b).float().norm() / b.float().norm()).item()
