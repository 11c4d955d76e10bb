"""Attention on the GPU: gradients of every backend against float64, and FA3's bits in the trainer and in the rollout's calls."""

import importlib.util

import pytest
import torch

from jetrl.attention import backends
from jetrl.attention.choice import fa3_obstacle
from jetrl.attention.packing import Packing, packing_of

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
BLOCK = 16  # tokens of a page of vLLM's KV cache


def _missing(name: str) -> str | None:
    if name == "jetrl_fa3":
        return fa3_obstacle()
    if name == "jetrl_fa2" and importlib.util.find_spec("flash_attn") is None:
        return "flash_attn is not installed"
    return None


def _packing(lengths) -> Packing:
    positions = torch.cat([torch.arange(n, device="cuda") for n in lengths]).unsqueeze(0)
    return packing_of(positions, 1)


def _qkv(tokens: int, heads: int, kv_heads: int, size: int):
    return [torch.randn(tokens, h, size, device="cuda", dtype=BF16) for h in (heads, kv_heads, kv_heads)]


def _gradients(attend, q, k, v, packing, window, grad):
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = attend(*leaves, packing, q.shape[-1] ** -0.5, window)
    out.backward(grad)
    return [out.detach(), *(t.grad for t in leaves)]


@pytest.mark.parametrize("name", sorted(set(backends.BACKENDS) - {"jetrl_rows"}))
@pytest.mark.parametrize("heads,kv_heads,size", ((32, 8, 128), (9, 3, 64), (4, 2, 64), (28, 4, 128)))
@pytest.mark.parametrize("window", (-1, 100))
def test_output_and_gradients_match_float64(name, heads, kv_heads, size, window):
    if _missing(name):
        pytest.skip(_missing(name))
    lengths = (1, 37, 300, 2, 513)
    packing = _packing(lengths)
    q, k, v = _qkv(sum(lengths), heads, kv_heads, size)
    grad = torch.randn_like(q)
    got = _gradients(backends.BACKENDS[name], q, k, v, packing, window, grad)
    want = _gradients(backends.reference, *(t.double() for t in (q, k, v)), packing, window, grad.double())
    for what, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        error = ((a.double() - b).norm() / b.norm()).item()
        # P and dS are rounded to bfloat16 before their products and the result once more: relative errors of 2**-9 each
        # (uniform in +-2**-9: 2**-9 / sqrt(3) rms), three in a chain: 2e-3; measured 2.6e-3 to 3.1e-3 with dP's rounding.
        assert error < 5e-3, f"{what}: {error:.2e}"


@pytest.mark.parametrize("warn_only", (False, True))
def test_backward_repeats_its_bits_when_deterministic(warn_only):
    if fa3_obstacle():
        pytest.skip(fa3_obstacle())
    lengths = (700, 300, 1048)
    packing = _packing(lengths)
    q, k, v = _qkv(sum(lengths), 32, 8, 128)
    grad = torch.randn_like(q)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        runs = [_gradients(backends.fa3, q, k, v, packing, -1, grad) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize(
    "heads,kv_heads,size", ((32, 8, 128), (9, 3, 64), (4, 2, 64), (28, 4, 128), (4, 4, 64), (8, 2, 256))
)
def test_a_sequence_has_the_same_bits_alone_in_a_pack_and_in_the_rollouts_calls(heads, kv_heads, size):
    """Packed forward = each sequence alone = paged prefill in chunks = paged one-token decode, scheduled ahead or not."""
    if fa3_obstacle():
        pytest.skip(fa3_obstacle())
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    from jetrl.integrations.vllm.unsplit_attention import SCHEDULED_AHEAD, longest_query

    lengths = (37, 1, 2048, 300, 777)
    q, k, v = _qkv(sum(lengths), heads, kv_heads, size)
    scale = size**-0.5
    packed = backends.fa3(q, k, v, _packing(lengths), scale, -1)
    pages = [-(-n // BLOCK) for n in lengths]
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32, device="cuda")
    order = torch.randperm(sum(pages), device="cuda").to(torch.int32)
    caches = [torch.zeros(sum(pages), BLOCK, kv_heads, size, device="cuda", dtype=BF16) for _ in range(2)]
    start = used = 0
    for i, n in enumerate(lengths):
        alone = backends.fa3(*(t[start : start + n] for t in (q, k, v)), _packing((n,)), scale, -1)
        assert torch.equal(alone, packed[start : start + n]), f"alone, length {n}"
        table[i, : pages[i]] = order[used : used + pages[i]]
        for cache, t in zip(caches, (k, v), strict=True):
            padded = torch.zeros(pages[i] * BLOCK, kv_heads, size, device="cuda", dtype=BF16)
            padded[:n] = t[start : start + n]
            cache[table[i, : pages[i]].long()] = padded.view(pages[i], BLOCK, kv_heads, size)
        start, used = start + n, used + pages[i]

    def rollout(queries, query_lens, seen, ahead):
        cu = torch.tensor([0, *query_lens], device="cuda").cumsum(0).to(torch.int32)
        seqlens = torch.tensor(seen, dtype=torch.int32, device="cuda")
        common = {
            "max_seqlen_q": longest_query(max(query_lens), heads, kv_heads, size),
            "max_seqlen_k": max(seen),
        }
        schedule = None
        if ahead:
            schedule = get_scheduler_metadata(
                batch_size=len(seen), num_heads_q=heads, num_heads_kv=kv_heads, headdim=size, cache_seqlens=seqlens,
                qkv_dtype=BF16, cu_seqlens_q=cu, page_size=BLOCK, causal=True, num_splits=1, **common,
            )  # fmt: skip
        return flash_attn_varlen_func(
            queries, *caches, cu_seqlens_q=cu, seqused_k=seqlens, block_table=table, softmax_scale=scale, causal=True,
            scheduler_metadata=schedule, num_splits=1, fa_version=3, **common,
        )  # fmt: skip

    bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
    for ahead in (False, True) if size in SCHEDULED_AHEAD else (False,):
        for back in (0, 1, 5, 100):
            # One query a sequence: decode, `back` tokens before the end (or the first token).
            at = [max(n - 1 - back, 0) for n in lengths]
            rows = torch.tensor([b + a for b, a in zip(bounds, at, strict=False)], device="cuda")
            out = rollout(q[rows], [1] * len(lengths), [a + 1 for a in at], ahead)
            assert torch.equal(out, packed[rows]), f"decode {back} before the end, scheduled ahead: {ahead}"
        # A prefill chunk of up to 128 tokens beside decodes: what chunked prefill and preemption give.
        chunk = [min(n, 128 if i % 2 == 0 else 1) for i, n in enumerate(lengths)]
        rows = torch.cat([torch.arange(b - c, b, device="cuda") for b, c in zip(bounds[1:], chunk, strict=True)])
        out = rollout(q[rows], chunk, list(lengths), ahead)
        assert torch.equal(out, packed[rows]), f"mixed chunks, scheduled ahead: {ahead}"
