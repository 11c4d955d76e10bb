"""What autograd keeps of the fused model between forward and backward is what the graph says, within 5 %.

The bound is for what the graph leaves out on purpose: one float32 a token and norm (its 1 / rms), one a head where q and k
are normed, padding of ragged widths in merged GEMMs, and the token's log-sum-exp.
"""

import pytest
import torch
from checkpoints_for_tests import ARCHITECTURES, VOCAB, build_model
from transformers import AttentionInterface

from jetrl.attention import token_logprobs
from jetrl.convert import convert
from jetrl.precision.build_hf import build_training_graph
from jetrl.precision.estimate import saved_bytes
from jetrl.precision.flow import PrecisionAssignment

TOKENS = 256


class FlashLike(torch.autograd.Function):
    """Keeps what flash attention keeps: q, k, v, its output and one log-sum-exp a head. torch's CPU attention expands k and v."""

    @staticmethod
    def forward(ctx, q, k, v):
        out = attend(q, k, v)
        ctx.save_for_backward(q, k, v, out, torch.zeros(q.shape[1], q.shape[2]))
        return out

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors[:3]]
            return torch.autograd.grad(attend(*inputs), inputs, grad)


def attend(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


AttentionInterface.register(
    "packed_for_tests", lambda module, q, k, v, *args, **kwargs: (FlashLike.apply(q, k, v), None)
)


def kept_bytes(model):
    """Bytes of all storages that autograd keeps, without parameters, rotary tables and the token ids."""
    ids = torch.arange(TOKENS).unsqueeze(0) % VOCAB
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = (t.untyped_storage().nbytes(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        logits = model(ids, use_cache=False).logits[0]
        token_logprobs(logits, ids[0], torch.ones(TOKENS), VOCAB).sum()
    tables = {t.untyped_storage().data_ptr() for _, t in kept.values() if t.dtype == torch.int64}
    for tensor in model.model.rotary_emb(logits, torch.arange(TOKENS)[None]):
        tables |= {at for at, (_, t) in kept.items() if t.shape[-1] == tensor.shape[-1] // 2 and t.dim() == 2}
    return sum(n for at, (n, _) in kept.items() if at not in own | tables)


@pytest.mark.parametrize("wgrad", ["requantize", "copy", pytest.param("blocks", marks=pytest.mark.slow), "bf16"])
@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_kept_bytes_are_those_of_the_graph(architecture, wgrad):
    model = build_model(architecture).to(torch.bfloat16)
    model.config._attn_implementation = "packed_for_tests"
    graph = build_training_graph(model, PrecisionAssignment(linear="fp8", wgrad=wgrad))
    assert len(convert(model, graph).fusion.fused) == 2
    predicted, measured = sum(saved_bytes(graph).values()), kept_bytes(model) / TOKENS
    assert abs(predicted / measured - 1) < 0.05, (predicted, measured)
