"""The fused decoder layer against the same operators one by one: forward bits, gradients, what is kept; and what is refused.

Runs on the GPU where there is one (the kernels), else on the CPU (their references).
"""

import copy

import pytest
import torch
from checkpoints_for_tests import ARCHITECTURES, VOCAB, build_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from jetrl import weight_cache
from jetrl.convert import convert, stock_forward
from jetrl.errors import UserError
from jetrl.fusion import trace
from jetrl.fusion.layer import attention_function
from jetrl.fusion.norm import rms_norm
from jetrl.linear import fp8_linear
from jetrl.precision.build_hf import build_training_graph
from jetrl.precision.flow import PrecisionAssignment
from jetrl.precision.formats import BF16, FP32

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WGRADS = ("requantize", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("copy", "blocks", "bf16")))
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


def test_a_layer_of_the_known_form_that_computes_something_else_keeps_its_forward_and_the_report_says_so():
    from transformers import GraniteConfig, GraniteForCausalLM

    sizes = dict(vocab_size=VOCAB, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4)
    model = GraniteForCausalLM(GraniteConfig(residual_multiplier=0.5, num_key_value_heads=2, **sizes))
    report = convert(model, build_training_graph(model, assignment()))
    assert not report.fusion.fused and len(report.swapped) == 14
    assert "2 decoder layers not fused (a small layer of its class computes something else: model.layers.0" in str(
        report
    )
    assert torch.isfinite(model(tokens().cpu()).logits).all()


SIZES = dict(vocab_size=VOCAB, hidden_size=256, intermediate_size=384, num_attention_heads=4, num_key_value_heads=2)


def test_layers_without_rotary_embedding_among_others_with_it_keep_their_forward():
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    config = SmolLM3Config(**SIZES, num_hidden_layers=3, no_rope_layers=[1, 0, 1], pad_token_id=0)
    model = SmolLM3ForCausalLM(config)
    report = convert(model, build_training_graph(model, assignment()))
    assert report.fusion.fused == ["model.layers.0", "model.layers.2"]
    assert report.fusion.kept == {"model.layers.1": "a small layer of its class computes something else"}


@pytest.mark.parametrize("window,fused", [(8, 0), (None, 2)])
def test_a_sliding_window_that_the_attention_module_does_not_hold_keeps_a_layer_from_being_fused(window, fused):
    from transformers import MistralConfig, MistralForCausalLM

    model = MistralForCausalLM(MistralConfig(**SIZES, num_hidden_layers=2, sliding_window=window))
    report = convert(model, build_training_graph(model, assignment()))
    assert len(report.fusion.fused) == fused
    assert all("sliding_window" in reason for reason in report.fusion.kept.values())


def test_a_layer_with_a_linear_in_bf16_keeps_its_forward():
    _, report = build("qwen3", exclude=("model.layers.0.mlp.down_proj",))
    assert report.fusion.fused == ["model.layers.1"]
    assert report.fusion.kept == {"model.layers.0": "not all of its linear layers run in FP8"}


def test_recognition_leaves_the_random_state_alone():
    model = build_model("qwen3")
    state = torch.get_rng_state()
    convert(model, build_training_graph(model, assignment()))
    assert torch.equal(torch.get_rng_state(), state)


def test_names_classes_and_copies_are_those_of_the_stock_model():
    stock, (model, _) = build_model("qwen3"), build("qwen3")
    assert [(n, type(m).__name__) for n, m in model.named_modules() if not isinstance(m, nn.Linear)] == [
        (n, type(m).__name__) for n, m in stock.named_modules() if not isinstance(m, nn.Linear)
    ]
    assert list(model.state_dict()) == list(stock.state_dict())
    ids, twin = tokens(), copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers[0].mlp.up_proj.weight.mul_(2)
    assert not torch.equal(model(ids).logits, twin(ids).logits)
    assert torch.equal(twin(ids, use_cache=False).logits, one_by_one(twin, ids))


def test_a_hook_on_a_child_is_not_passed_over():
    model, _ = build("qwen3")
    model.model.layers[1].mlp.register_forward_hook(lambda m, a, out: out)
    with pytest.raises(UserError, match="wrapped or has a hook"):
        model(tokens())


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


def test_a_backward_hook_on_a_child_is_not_passed_over():
    model, _ = build("qwen3")
    model.model.layers[1].self_attn.o_proj.register_full_backward_hook(lambda m, gi, go: None)
    with pytest.raises(UserError, match="wrapped or has a hook"):
        model(tokens())


def test_a_linear_inside_a_wrapper_that_passes_attributes_on_is_refused():
    """FSDP1 with a wrap policy by size wraps single linears, runs no hook, and shows weights that are not gathered."""

    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def __getattr__(self, name):
            return self._modules["module"] if name == "module" else getattr(self._modules["module"], name)

    model, _ = build("qwen3")
    attention = model.model.layers[1].self_attn
    attention.q_proj = Wrapper(attention.q_proj)
    with pytest.raises(UserError, match="wrapped or has a hook"):
        model(tokens())


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


# The cache of weight codes ------------------------------------------------------------------------------------------


@pytest.fixture
def generation(monkeypatch):
    monkeypatch.setattr(weight_cache, "_generation", 0)
    monkeypatch.setattr(weight_cache, "_moves", 0)


def made(monkeypatch, run):
    """How many weights were quantized during run()."""
    count, stock = [0], weight_cache._quantize

    def counting(use, weights, scale_format):
        count[0] += len(weights)
        return stock(use, weights, scale_format)

    with monkeypatch.context() as patch:
        patch.setattr(weight_cache, "_quantize", counting)
        run()
    return count[0]


@pytest.mark.parametrize("cache,per_pass", [("step", (14, 0)), ("auto", (14, 0)), ("micro_batch", (14, 14))])
def test_codes_are_made_once_per_generation_only_where_chosen(cache, per_pass, generation, monkeypatch):
    model, _ = build("qwen3", cache=cache)
    for _ in range(weight_cache.FIRST_AUTO_GENERATION):
        weight_cache.weights_changed()
    ids = tokens()
    assert tuple(made(monkeypatch, lambda: model(ids, use_cache=False)) for _ in range(2)) == per_pass
    weight_cache.weights_changed()
    assert made(monkeypatch, lambda: model(ids, use_cache=False)) == 14


def test_auto_does_not_take_offloading_for_an_optimizer_step(generation, monkeypatch):
    model, _ = build("qwen3", cache="auto")
    weight_cache.weights_changed()
    for _ in range(weight_cache.FIRST_AUTO_GENERATION):
        weight_cache.weights_changed(moved=True)
    ids = tokens()
    assert [made(monkeypatch, lambda: model(ids, use_cache=False)) for _ in range(2)] == [14, 14]


def test_nothing_is_kept_before_somebody_announces_changes(generation, monkeypatch):
    model, _ = build("qwen3", cache="step")
    ids = tokens()
    assert [made(monkeypatch, lambda: model(ids, use_cache=False)) for _ in range(2)] == [14, 14]


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("architecture", [pytest.param("qwen3", marks=pytest.mark.slow), "llama-ragged-tied"])
def test_kept_codes_are_never_stale(architecture, announced, generation):
    """After a change in place of a parameter, announced or not, outputs and gradients are those of a model without cache."""
    model, _ = build(architecture, cache="step")
    fresh, _ = build(architecture, cache="micro_batch")
    weight_cache.weights_changed()
    ids = tokens()
    for _ in range(2):
        ours = gradients(model(ids, use_cache=False).logits, ids, model)
        want = gradients(fresh(ids, use_cache=False).logits, ids, fresh)
        assert all(torch.equal(ours[n], want[n]) for n in want if DEVICE == "cpu")
        assert torch.equal(model(ids, use_cache=False).logits, fresh(ids, use_cache=False).logits)
        for m in (model, fresh):
            torch.optim.SGD(m.parameters(), lr=0.1).step()
        if announced:
            weight_cache.weights_changed()


def test_a_load_without_notice_is_seen(generation):
    model, _ = build("qwen3", cache="step")
    weight_cache.weights_changed()
    ids = tokens()
    model(ids)
    other = build_model("qwen3", seed=5).bfloat16().to(DEVICE)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(ids, use_cache=False).logits, one_by_one(model, ids))


def test_kept_codes_are_in_no_checkpoint_and_are_freed(generation):
    model, _ = build("qwen3", cache="step")
    names = set(model.state_dict())
    weight_cache.weights_changed()
    model(tokens())
    layer = model.model.layers[0]
    assert layer.jetrl_steps.before.qkv.codes._kept and set(model.state_dict()) == names
    assert not any(b.dtype == torch.float8_e4m3fn for b in model.buffers())
    weight_cache.weights_changed()
    assert not layer.jetrl_steps.before.qkv.codes._kept


def test_an_unknown_choice_is_refused():
    with pytest.raises(UserError, match="weight_cache=always is unknown; allowed: auto, step, micro_batch"):
        build("qwen3", cache="always")


def test_checkpoint_of_a_single_step_recomputes_the_same(generation):
    model, _ = build("qwen3", torch.float32)
    layer = model.model.layers[0]
    hidden = torch.randn(1, 20, 256, device=DEVICE, requires_grad=True)
    tables = model.model.rotary_emb(hidden, torch.arange(20, device=DEVICE)[None])

    def run():
        return layer(hidden, position_embeddings=tables).square().sum()

    (plain,) = torch.autograd.grad(run(), hidden)
    (again,) = torch.autograd.grad(checkpoint(run, use_reentrant=False), hidden)
    assert torch.equal(plain, again)
