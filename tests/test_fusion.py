"""The fused decoder layer against the same operators one by one: forward bits, gradients, what is kept for backward."""

import pytest
import torch
from checkpoints_for_tests import ARCHITECTURES, build_model
from fusion_for_tests import ATTENTION, DEVICE, build, gradients, one_by_one, relative, tokens
from torch.utils.checkpoint import checkpoint

from jetrl.convert import stock_forward
from jetrl.fusion import trace

WGRADS = ("requantize", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("copy", "blocks", "bf16")))


@pytest.mark.parametrize("wgrad", WGRADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_forward_has_the_bits_of_the_operators_one_by_one(architecture, dtype, wgrad):
    model, report = build(architecture, dtype, wgrad=wgrad)
    assert len(report.fusion.fused) == 2 and not report.fusion.kept
    ids = tokens()
    assert torch.equal(model(ids, use_cache=False).logits, one_by_one(model, ids))


@pytest.mark.parametrize("wgrad", WGRADS)
@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_gradients_are_those_of_the_operators_one_by_one(architecture, wgrad):
    """FP32 carriers: the two differ where dx of q, k and v (gate and up) is summed in one GEMM instead of three results.

    That is float32 rounding, 2^-24 of values that are then quantized again; where it moves one across a rounding boundary of
    E4M3, that element moves by a step of at most 2^-3 of itself. With a share 2^-24 * 2^4 (values per step) of elements
    moved, the norm of a gradient moves by less than 2^-3 * sqrt(2^-20) = 1.2e-4 per GEMM on its way; 14 GEMMs: 2e-3 covers it.
    """
    model, _ = build(architecture, torch.float32, wgrad=wgrad)
    ids = tokens()
    fused = gradients(model(ids, use_cache=False).logits, ids, model)
    want = gradients(one_by_one(model, ids), ids, model)
    worst = max((relative(fused[name], want[name]), name) for name in want)
    assert worst[0] < 4e-3, worst


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_checkpointing_by_layer_changes_no_bit(architecture):
    model, _ = build(architecture)
    ids = tokens()
    plain = gradients(model(ids, use_cache=False).logits, ids, model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    again = gradients(model(ids, use_cache=False).logits, ids, model)
    # The embedding's gradient is a sum of atomics on a GPU.
    assert all(
        torch.equal(plain[n], again[n]) for n in plain if DEVICE == "cpu" or "embed" not in n and "lm_head" not in n
    )


def test_recomputing_a_checkpointed_layer_leaves_out_its_last_gemm():
    """As torch's checkpointing does for a layer that ends in nn.Linear: nothing in the backward reads its output."""
    model, _ = build("qwen3")
    layer = model.model.layers[0]
    hidden = torch.randn(1, 20, 256, device=DEVICE).bfloat16().requires_grad_()
    tables = model.model.rotary_emb(hidden, torch.arange(20, device=DEVICE)[None])

    class Names(trace.Listener):
        def enter(self, names):
            seen.append(names[0])

        def leave(self):
            pass

    seen: list[str] = []
    trace.listen(Names())
    try:
        out = checkpoint(lambda: layer(hidden, position_embeddings=tables), use_reentrant=False)
        forward = list(seen)
        seen.clear()
        out.sum().backward()
    finally:
        trace.listen(None)
    assert forward[-1] == "mlp.down_proj" and seen == forward[:-1]


def saved_storages(run):
    """Tensors that autograd keeps during run(), by storage: (dtype, bytes)."""
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = (t.dtype, t.untyped_storage().nbytes())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = run()
    return kept, out


@pytest.mark.parametrize("wgrad", ["requantize", "copy"])
def test_no_unquantized_input_of_a_linear_is_kept(wgrad):
    """Kept in BF16 per token and layer of this Qwen3: two residual streams, q and k before and after the rotation, v, gate, up,
    attention's output; everything else that is as large is one byte an element. A norm's or the activation's output is not."""
    model, _ = build("qwen3", wgrad=wgrad)
    layer, rows = model.model.layers[0], 128
    hidden = torch.randn(1, rows, 256, device=DEVICE).bfloat16().requires_grad_()
    tables = model.model.rotary_emb(hidden, torch.arange(rows, device=DEVICE)[None])
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    own |= {t.untyped_storage().data_ptr() for t in tables}
    kept, _ = saved_storages(lambda: layer(hidden, position_embeddings=tables))
    bf16 = sum(n for at, (dtype, n) in kept.items() if dtype == torch.bfloat16 and at not in own)
    heads, kv = 4 * 64, 2 * 64
    assert bf16 == 2 * rows * (2 * 256 + (heads + 2 * kv) + (heads + kv) + 2 * 512 + heads)
    fp8 = sum(n for dtype, n in kept.values() if dtype == torch.float8_e4m3fn)
    assert fp8 == rows * (256 + heads + 256 + 512)


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_stock_forward_is_the_unconverted_model(architecture):
    model, _ = build(architecture)
    stock = build_model(architecture).bfloat16().to(DEVICE)
    stock.config._attn_implementation = "sdpa"
    ids = tokens()
    with torch.no_grad():
        fused = model(ids).logits
        with stock_forward(model):
            assert torch.equal(model(ids).logits, stock(ids).logits)
        assert torch.equal(model(ids).logits, fused) and not torch.equal(fused, stock(ids).logits)
    with pytest.raises(ValueError, match="torch.no_grad"), stock_forward(model):
        pass


def test_generation_with_a_cache_gives_the_logits_of_the_whole_sequence():
    model, _ = build("llama-ragged-tied", torch.float32)
    ids = tokens(1, 9)
    whole = model(ids, use_cache=False).logits
    first = model(ids[:, :8], use_cache=True)
    last = model(ids[:, 8:], past_key_values=first.past_key_values, use_cache=True).logits
    # Another attention kernel runs for one query; 1e-3 of the logits' size is far above float32 and far below a lost token.
    torch.testing.assert_close(last[:, 0], whole[:, 8], rtol=1e-3, atol=1e-3)


def test_attention_input_takes_gradients_of_any_strides_without_head_norms():
    """The kernel refuses heads that are not contiguous, and without norms it is given the gradients as q and k too."""
    model, _ = build("llama-ragged-tied")
    layer = model.model.layers[0]
    step, attention = layer.jetrl_steps.before, layer.self_attn
    hidden = torch.randn(5, attention.q_proj.in_features, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    half = torch.ones(5, attention.head_dim // 2, dtype=torch.bfloat16, device=DEVICE)
    qkv = [getattr(attention, n) for n in ATTENTION[:3]]
    outs = step(
        hidden, layer.input_layernorm.weight, (None, None), half, half, [m.weight for m in qkv], [m.bias for m in qkv]
    )
    seen, stock = [], torch.ops.jetrl.qk_norm_rotary_backward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.jetrl, "qk_norm_rotary_backward", lambda *a: seen.extend(a[:5]) or stock(*a))
        torch.autograd.backward(
            outs,
            [torch.randn(*o.shape[::-1], dtype=o.dtype, device=DEVICE).permute(*range(o.dim())[::-1]) for o in outs],
        )
    assert len(seen) == 5 and all(t.stride(-1) == 1 for t in seen)
    assert torch.isfinite(hidden.grad).all()
