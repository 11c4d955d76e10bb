"""Packed attention of the trainer: where sequences begin, the plumbing through a real Hugging Face model, the choice."""

from functools import partial

import pytest
import torch
from jetrl_kernels.attention_reference import attend_rows
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, Qwen3Config, Qwen3ForCausalLM
from transformers.masking_utils import flash_attention_mask
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from jetrl import attention
from jetrl.attention import backends, choice, packing, sequence_parallel
from jetrl.attention.interface import attention_forward
from jetrl.errors import UserError

LENGTHS = (5, 1, 7, 3)


@pytest.fixture
def packed_model():
    """A small Qwen3 in float64 whose attention goes through jetrl's interface with the reference backend."""
    attention.register()
    AttentionInterface.register("jetrl_reference", partial(attention_forward, backends.reference))
    AttentionMaskInterface.register("jetrl_reference", flash_attention_mask)
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=50, attn_implementation="jetrl_reference",
    )  # fmt: skip
    return Qwen3ForCausalLM(config).double()


def _packed_inputs():
    ids = torch.randint(0, 50, (1, sum(LENGTHS)))
    return ids, torch.cat([torch.arange(n) for n in LENGTHS]).unsqueeze(0)


def _packed(model, ids, positions):
    return model(input_ids=ids, position_ids=positions, use_cache=False).logits


def _one_by_one(model, ids, positions):
    return torch.cat([model(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, dim=1)], dim=1)


@pytest.mark.parametrize("checkpointing", (False, True))
def test_packed_sequences_give_the_logits_and_gradients_of_each_sequence_alone(packed_model, checkpointing):
    ids, positions = _packed_inputs()
    if checkpointing:
        packed_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    packed_model.train()
    weights = torch.randn(1, ids.shape[1], 50, dtype=torch.float64)
    gradients = []
    for run, attn in ((_packed, "jetrl_reference"), (_one_by_one, "sdpa")):
        packed_model.config._attn_implementation = attn
        packed_model.zero_grad()
        logits = run(packed_model, ids, positions)
        (logits * weights).sum().backward()
        gradients.append((logits.detach(), [p.grad.clone() for p in packed_model.parameters()]))
    # float64 with sums of at most 100 terms in another order; values of order 1 to 100.
    torch.testing.assert_close(gradients[0][0], gradients[1][0], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(gradients[0][1], gradients[1][1], rtol=1e-10, atol=1e-10)


def test_a_window_hides_what_is_further_back():
    q, k, v = (torch.randn(9, h, 8, dtype=torch.float64) for h in (4, 2, 2))
    whole = packing.rows_of(1, 9, q.device)
    out = backends.reference(q, k, v, whole, 0.3, 2)
    last = backends.reference(q[6:], k[6:], v[6:], packing.rows_of(1, 3, q.device), 0.3, -1)
    torch.testing.assert_close(out[-1], last[-1], rtol=1e-12, atol=1e-12)


def test_sequences_begin_at_position_zero_and_are_found_once_for_a_tensor(monkeypatch):
    _, positions = _packed_inputs()
    calls = []
    monkeypatch.setattr(packing, "_find", lambda p, find=packing._find: calls.append(1) or find(p))
    first = packing.packing_of(positions, 1)
    assert first.cu_seqlens.tolist() == [0, 5, 6, 13, 16] and first.longest == 7
    assert packing.packing_of(positions, 1) is first and len(calls) == 1
    positions[0, 13:] = torch.arange(7, 10)  # written in place: another batch in the same tensor
    assert packing.packing_of(positions, 1).cu_seqlens.tolist() == [0, 5, 6, 16]
    assert packing.packing_of(torch.arange(4).unsqueeze(0), 3).cu_seqlens.tolist() == [0, 4, 8, 12]


def test_positions_that_start_in_the_middle_of_a_sequence_are_refused():
    with pytest.raises(ValueError, match="start at 0"):
        packing.packing_of(torch.arange(3, 9).unsqueeze(0), 1)


def test_padding_and_a_cache_are_refused(packed_model):
    ids = torch.randint(0, 50, (2, 6))
    mask = torch.ones(2, 6, dtype=torch.long)
    packed_model(input_ids=ids, attention_mask=mask)
    mask[1, :2] = 0
    with pytest.raises(ValueError, match="use_remove_padding=true"):
        packed_model(input_ids=ids, attention_mask=mask)
    cache = packed_model(input_ids=ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="use_cache=False"):
        packed_model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)


class _TwoRanksInOne:
    """Both ranks of a sequence-parallel pair in one process: the batch axis carries the rank."""

    def active(self):
        return True

    def heads_for_tokens(self, q, k, v):
        return tuple(torch.cat(list(t.chunk(2, dim=0)), dim=1) for t in (q, k, v))

    def tokens_for_heads(self, out):
        return torch.cat(list(out.chunk(2, dim=1)), dim=0)

    def gather_positions(self, position_ids):
        return torch.cat(list(position_ids.chunk(2, dim=0)), dim=1)


def test_sequence_parallel_exchange_surrounds_attention(packed_model):
    ids, positions = _packed_inputs()
    want = packed_model(input_ids=ids, position_ids=positions, use_cache=False).logits
    halves = [t.view(2, -1) for t in (ids, positions)]
    sequence_parallel.use(_TwoRanksInOne())
    try:
        got = packed_model(input_ids=halves[0], position_ids=halves[1], use_cache=False).logits
    finally:
        sequence_parallel.use(None)
    torch.testing.assert_close(got.view(1, -1, 50), want, rtol=1e-11, atol=1e-11)


def test_choice_says_why():
    config = Qwen3Config()
    assert choice.choose(config, "cpu", True) == choice.Choice("sdpa", "device cpu")
    assert "use_remove_padding" in choice.choose(config, "cuda", False).reason
    assert "float32" in choice.choose(config, "cuda", True, torch.float32).reason
    if not torch.cuda.is_available():
        packed = choice.choose(config, "cuda", True)
        assert packed.name in ("jetrl_fa2", "jetrl_varlen") and "no GPU" in packed.reason
        with pytest.raises(UserError, match="unified_exact needs jetrl_fa3.*no GPU.*unified_fp8"):
            choice.require_exact(config, "cuda", True)


def test_rotary_and_its_gradient_have_the_bytes_of_hugging_face_eager():
    for dtype in (torch.bfloat16, torch.float32):
        q, k = (torch.randn(6, h, 32).to(dtype).requires_grad_() for h in (4, 2))
        angle = torch.rand(6, 16) * 6
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        grads = [torch.randn(6, h, 32).to(dtype) for h in (4, 2)]
        results = []
        full = [torch.cat((t, t), dim=-1) for t in (cos, sin)]
        for out in (attention.rotary(q, k, cos, sin), apply_rotary_pos_emb(q, k, *full, unsqueeze_dim=1)):
            q.grad = k.grad = None
            torch.autograd.backward(out, grads)
            results.append((*out, q.grad, k.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_norm_and_rotary_gradient_matches_float64():
    q, k = (torch.randn(6, h, 32).requires_grad_() for h in (4, 2))
    weights = [torch.randn(32).requires_grad_() for _ in range(2)]
    angle = torch.rand(6, 16) * 6
    grads = [torch.randn(6, h, 32) for h in (4, 2)]
    leaves = (q, k, *weights)
    torch.autograd.backward(attention.qk_norm_rotary(q, k, *weights, 1e-6, angle.cos(), angle.sin()), grads)
    twins = [t.detach().double().requires_grad_() for t in leaves]
    full = [torch.cat((t, t), dim=-1).double() for t in (angle.cos(), angle.sin())]
    normed = [
        x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w for x, w in zip(twins[:2], twins[2:], strict=True)
    ]
    torch.autograd.backward(apply_rotary_pos_emb(*normed, *full, unsqueeze_dim=1), [g.double() for g in grads])
    for leaf, twin in zip(leaves, twins, strict=True):
        # float32 arithmetic on sums of at most 32 * 24 terms of order 1.
        torch.testing.assert_close(leaf.grad.double(), twin.grad, rtol=1e-4, atol=1e-4)


def test_logprob_gradient_reaches_the_logits():
    logits = torch.randn(3, 20).requires_grad_()
    ids, t = torch.tensor([1, 5, 19]), torch.tensor([1.0, 0.5, 2.0])
    attention.token_logprobs(logits, ids, t, 20).sum().backward()
    twin = logits.detach().double().requires_grad_()
    torch.log_softmax(twin / t.double()[:, None], -1).gather(1, ids[:, None]).sum().backward()
    torch.testing.assert_close(logits.grad.double(), twin.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_row_by_row_attention_gives_a_token_its_bits_whole_in_chunks_and_one_at_a_time(dtype):
    n, size = 53, 24
    q, k, v = (torch.randn(n, h, size).to(dtype) for h in (4, 2, 2))
    seen = torch.arange(1, n + 1)
    whole = attend_rows(q, k, v, seen, 0.2)
    for start, end in ((0, 1), (7, 8), (30, 53), (15, 17)):
        part = attend_rows(q[start:end], k[:end], v[:end], seen[start:end], 0.2)
        assert torch.equal(part, whole[start:end])
    exact = backends.reference(*(t.double() for t in (q, k, v)), packing.rows_of(1, n, q.device), 0.2, -1)
    # float32 arithmetic on at most 53 terms of order 1, then one rounding to the dtype.
    torch.testing.assert_close(whole.double(), exact, rtol=2.0**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_row_by_row_attention_has_the_gradient_of_attention():
    leaves = [torch.randn(9, h, 8).requires_grad_() for h in (4, 2, 2)]
    grad, packed = torch.randn(9, 4, 8), packing.Packing(torch.tensor([0, 4, 9], dtype=torch.int32), 5)
    # As in a layer under gradient checkpointing, which looks at a saved tensor once.
    checkpoint(backends.rows, *leaves, packed, 0.3, -1, use_reentrant=False).backward(grad)
    twins = [t.detach().double().requires_grad_() for t in leaves]
    backends.reference(*twins, packed, 0.3, -1).backward(grad.double())
    for leaf, twin in zip(leaves, twins, strict=True):
        torch.testing.assert_close(leaf.grad.double(), twin.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("on,warn_only", ((True, True), (True, False), (False, False)))
def test_a_flash_backward_is_not_merely_warned_about_and_the_mode_is_put_back(on, warn_only):
    torch.use_deterministic_algorithms(on, warn_only=warn_only)
    try:
        with pytest.raises(ZeroDivisionError), backends.without_warn_only():
            inside = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
            raise ZeroDivisionError
        after = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert inside == (on, False) and after == (on, warn_only)
