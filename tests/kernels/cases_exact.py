"""Rotary and log-probability kernels: bytes of Hugging Face's eager rotary, one order of every sum, values against float64."""

import pytest
import torch
from cases_quantize import DEVICE
from jetrl_kernels import logprob_reference, norm_reference, rotary_reference
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

rotary_triton = pytest.importorskip("jetrl_kernels.rotary_triton", reason="Triton is not installed")
logprob_triton = pytest.importorskip("jetrl_kernels.logprob_triton", reason="Triton is not installed")
norm_triton = pytest.importorskip("jetrl_kernels.norm_triton")

DTYPES = (torch.bfloat16, torch.float32)


def _on_device(*tensors):
    return [None if t is None else t.to(DEVICE) for t in tensors]


def _case(generator, tokens, q_heads, k_heads, size, half, dtype, rows=None):
    """q and k as views into one merged matrix (as after a merged projection), cos and sin of random angles."""
    merged = torch.randn(tokens, (q_heads + k_heads) * size, generator=generator).to(dtype)
    q, k = merged[:, : q_heads * size], merged[:, q_heads * size :]
    angle = torch.rand(rows or tokens, half, generator=generator) * 6.3
    return q.view(tokens, q_heads, size), k.view(tokens, k_heads, size), angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens,q_heads,k_heads,size", ((2, 4, 2, 64), (1, 9, 3, 64), (2, 1, 1, 128), (0, 2, 1, 64)))
def test_rotary_gives_the_bytes_of_hugging_face_eager(tokens, q_heads, k_heads, size, dtype, generator):
    q, k, cos, sin = _case(generator, tokens, q_heads, k_heads, size, size // 2, dtype)
    full = [torch.cat((t, t), dim=-1) for t in (cos, sin)]
    # Eager on this device: (T, H, D) with one head axis after the tokens.
    expected = apply_rotary_pos_emb(*_on_device(q, k, *full), unsqueeze_dim=1)
    for got, reference, want in zip(
        rotary_triton.rotary(*_on_device(q, k, cos, sin), None, False),
        rotary_reference.rotary(q, k, cos, sin, None, False),
        expected,
        strict=True,
    ):
        assert torch.equal(got, want) and torch.equal(reference, want.cpu())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inverse", (False, True))
def test_rotary_by_positions_and_with_a_part_that_passes_through(inverse, dtype, generator):
    q, k, cos, sin = _case(generator, 3, 2, 1, 48, 16, dtype, rows=11)
    positions = torch.randint(0, 11, (3,), generator=generator)
    got = rotary_triton.rotary(*_on_device(q, k, cos, sin, positions), inverse)
    expected = rotary_reference.rotary(q, k, cos, sin, positions, inverse)
    for a, b, x in zip(got, expected, (q, k), strict=True):
        assert torch.equal(a.cpu(), b) and torch.equal(a.cpu()[..., 32:], x[..., 32:])


@pytest.mark.parametrize("tokens", (4, 600) if DEVICE != "cpu" else (2,))
def test_norm_and_rotary_in_one_kernel_give_the_bytes_of_one_after_the_other(tokens, generator):
    # The interpreter runs one program after another, each as slowly as a hundred calls of torch.
    sizes, heads = ((64,), (2, 1)) if DEVICE == "cpu" else ((64, 128), (5, 2))
    for size in sizes:
        q, k, cos, sin = _case(generator, tokens, *heads, size, size // 2, torch.bfloat16)
        weights = [torch.randn(size, generator=generator).to(torch.bfloat16) for _ in range(2)]
        q, k, cos, sin, *weights = _on_device(q, k, cos, sin, *weights)
        got = rotary_triton.qk_norm_rotary(q, k, *weights, 1e-6, cos, sin, None)
        normed = [
            norm_triton.rms_norm(x.reshape(-1, size), None, w, 1e-6) for x, w in zip((q, k), weights, strict=True)
        ]
        expected = rotary_triton.rotary(
            *(y.view(x.shape) for (y, _, _), x in zip(normed, (q, k), strict=True)), cos, sin, None, False
        )
        for a, b in zip(got[:2], expected, strict=True):
            assert torch.equal(a, b)
        for a, (_, _, rstd) in zip(got[2:], normed, strict=True):
            assert torch.equal(a.view(-1), rstd)


def test_reference_of_norm_and_rotary_is_the_composition(generator):
    q, k, cos, sin = _case(generator, 4, 2, 1, 64, 32, torch.bfloat16)
    w = torch.randn(64, generator=generator).to(torch.bfloat16)
    got = rotary_reference.qk_norm_rotary(q, k, w, w, 1e-6, cos, sin, None)
    normed = [norm_reference.rms_norm(x.reshape(-1, 64), None, w, 1e-6)[0].view(x.shape) for x in (q, k)]
    for a, b in zip(got[:2], rotary_reference.rotary(*normed, cos, sin, None, False), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("columns,vocab", ((5000, 5000), (5000, 4097), (300, 289)))
def test_a_tokens_logprob_has_one_value_for_any_dtype_mask_or_number_of_rows(columns, vocab, generator):
    logits = (torch.randn(6, columns, generator=generator) * 4).to(torch.bfloat16).to(DEVICE)
    ids = torch.randint(0, vocab, (6,), generator=generator).to(DEVICE)
    t = torch.full((6,), 0.7, device=DEVICE)
    logprob, lse = logprob_triton.token_logprobs(logits, ids, t, vocab)
    masked = logits.float()
    masked[:, vocab:] = float("-inf")
    # float32 logits that were masked, as vLLM's sampler has them; a few rows only; logits divided beforehand.
    for other in (
        logprob_triton.token_logprobs(masked, ids, t, columns),
        logprob_triton.token_logprobs(masked / t[:, None], ids, torch.ones_like(t), columns),
    ):
        assert torch.equal(other[0], logprob) and torch.equal(other[1], lse)
    for row in (0, 5):
        part = logprob_triton.token_logprobs(logits[row : row + 1], ids[row : row + 1], t[:1], vocab)
        assert torch.equal(part[0], logprob[row : row + 1])
    z = logits[:, :vocab].double().cpu() / t.double().cpu()[:, None]
    exact = torch.log_softmax(z, -1).gather(1, ids.cpu()[:, None]).squeeze(1)
    # z and the differences from it are rounded to float32 (2**-24 of up to 40 each, four times); the sum of exponentials
    # has a relative error of about 1e-6 (2**-22 a term from the exponential, 2**-24 an addition).
    torch.testing.assert_close(logprob.double().cpu(), exact, rtol=0, atol=4 * 40 * 2.0**-24 + 2e-6)
    reference = logprob_reference.token_logprobs(logits.cpu(), ids.cpu(), t.cpu(), vocab)
    torch.testing.assert_close(reference[0].double(), exact, rtol=0, atol=4 * 40 * 2.0**-24 + 2e-6)


def test_an_id_outside_the_vocabulary_is_nan_and_reads_nothing(generator):
    """The row before and the row behind hold finite logits, which an unchecked read would return."""
    logits = torch.randn(5, 64, generator=generator)
    ids, t = torch.tensor([3, -1, 40, 64, 10**9]), torch.ones(5)
    grad = torch.ones(5)
    for vocab, outside in ((40, [1, 2, 3, 4]), (64, [1, 3, 4])):
        wants = torch.zeros(5, dtype=torch.bool).index_fill(0, torch.tensor(outside), True)
        logprob, lse = logprob_triton.token_logprobs(*_on_device(logits, ids, t), vocab)
        reference, _ = logprob_reference.token_logprobs(logits, ids, t, vocab)
        assert torch.equal(logprob.isnan().cpu(), wants) and torch.equal(reference.isnan(), wants)
        assert lse.isfinite().all()
        got = logprob_triton.token_logprobs_backward(*_on_device(grad, logits, ids, t, lse), vocab).cpu()
        want = logprob_reference.token_logprobs_backward(grad, logits, ids, t, lse.cpu(), vocab)
        # Float32 exponentials of two libraries, at most 1: 4 units of the last place each.
        torch.testing.assert_close(got, want, rtol=0, atol=2 * 4 * 2.0**-24)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logprob_backward_matches_float64_autograd(dtype, generator):
    logits = torch.randn(4, 300, generator=generator).to(dtype)
    ids, t = torch.randint(0, 289, (4,), generator=generator), torch.tensor([1.0, 0.5, 2.0, 0.7])
    grad = torch.randn(4, generator=generator)
    x64 = logits.double().requires_grad_()
    z = x64[:, :289] / t.double()[:, None]
    (torch.log_softmax(z, -1).gather(1, ids[:, None]).squeeze(1) * grad.double()).sum().backward()
    _, lse = logprob_reference.token_logprobs(logits, ids, t, 289)
    got = logprob_triton.token_logprobs_backward(*_on_device(grad, logits, ids, t, lse), 289).cpu()
    want = logprob_reference.token_logprobs_backward(grad, logits, ids, t, lse, 289)
    # One rounding to the dtype of the logits (2**-8 relative for bfloat16) and 1e-6 of a probability below 1.
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
    for result in (got, want):
        torch.testing.assert_close(result.double(), x64.grad, rtol=rounding, atol=5e-6)
        assert not result[:, 289:].any()
