"""Causal attention over packed sequences with autograd, by one of several kernels, all with one signature.

`attend(q, k, v, packing, scale, window) -> (T, H, D)`: q (T, H, D), k and v (T, Hkv, D) with Hkv dividing H, contiguous
along D; `window` is how many earlier tokens a token sees besides itself, -1 for all of them. Under
`torch.use_deterministic_algorithms(True)` the backward of each gives the same bits again; with `warn_only=True`, which is what
VeRL's full_determinism sets, that of `fa3` and `fa2` does, while torch's own variable-length attention only warns.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from jetrl_kernels.attention_reference import attend_rows

from jetrl.attention.packing import Packing

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Packing, float, int], torch.Tensor]


@contextmanager
def without_warn_only() -> Iterator[None]:
    """torch's flash backward ignores deterministic mode under warn_only=True: it warns and adds dQ in any order."""
    relaxed = torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    if relaxed:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        if relaxed:
            torch.use_deterministic_algorithms(True, warn_only=True)


class _FlashAttention3(torch.autograd.Function):
    """vLLM's FA3 forward, which has no backward of its own, and torch's flash backward, which takes its log-sum-exp.

    num_splits=1: the key loop of a query is never divided, so a token's output has the bits it has in vLLM's paged
    decode and chunked prefill, whatever else is in the batch.
    """

    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, longest, scale, window):
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        out, lse = flash_attn_varlen_func(
            q,
            k,
            v,
            max_seqlen_q=longest,
            cu_seqlens_q=cu_seqlens,
            max_seqlen_k=longest,
            cu_seqlens_k=cu_seqlens,
            softmax_scale=scale,
            causal=True,
            window_size=[window, 0] if window >= 0 else None,
            return_softmax_lse=True,
            num_splits=1,
            fa_version=3,
        )
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)
        ctx.longest, ctx.scale, ctx.window = longest, scale, window
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse, cu_seqlens = ctx.saved_tensors
        # Random state of a dropout that is not used, and a tensor the operator ignores.
        seed, unused = (torch.zeros(2, dtype=torch.uint64, device=q.device) for _ in range(2))
        with without_warn_only():
            dq, dk, dv = torch.ops.aten._flash_attention_backward(
                grad.contiguous(),
                q,
                k,
                v,
                out,
                lse,
                cu_seqlens,
                cu_seqlens,
                ctx.longest,
                ctx.longest,
                0.0,
                ctx.window < 0,
                seed,
                unused,
                scale=ctx.scale,
                window_size_left=ctx.window,
                window_size_right=0,
            )
        return dq, dk, dv, None, None, None, None


def fa3(q, k, v, packing: Packing, scale: float, window: int) -> torch.Tensor:
    return _FlashAttention3.apply(q, k, v, packing.cu_seqlens, packing.longest, scale, window)


def fa2(q, k, v, packing: Packing, scale: float, window: int) -> torch.Tensor:
    """The flash-attn package."""
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        q,
        k,
        v,
        packing.cu_seqlens,
        packing.cu_seqlens,
        packing.longest,
        packing.longest,
        softmax_scale=scale,
        causal=True,
        window_size=(window, 0) if window >= 0 else (-1, -1),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def varlen(q, k, v, packing: Packing, scale: float, window: int) -> torch.Tensor:
    """torch's own variable-length attention."""
    from torch.nn.attention.varlen import varlen_attn

    cu, longest = packing.cu_seqlens, packing.longest
    return varlen_attn(q, k, v, cu, cu, longest, longest, scale=scale, window_size=(window, 0))


class _Rows(torch.autograd.Function):
    """jetrl_kernels.attention_reference, which vLLM-CPU runs in an exact flow; backward by torch's attention."""

    @staticmethod
    def forward(ctx, q, k, v, packing, scale):
        ctx.save_for_backward(q, k, v)
        ctx.packing, ctx.scale = packing, scale
        bounds = packing.cu_seqlens.tolist()
        pieces = []
        for start, end in zip(bounds, bounds[1:], strict=False):
            seen = torch.arange(1, end - start + 1, device=q.device)
            pieces.append(attend_rows(q[start:end], k[start:end], v[start:end], seen, scale))
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx, grad):
        saved = ctx.saved_tensors  # once: gradient checkpointing refuses a second look
        leaves = [t.detach().to(torch.float32).requires_grad_() for t in saved]
        with torch.enable_grad():
            out = reference(*leaves, ctx.packing, ctx.scale, -1)
        gradients = torch.autograd.grad(out, leaves, grad.to(torch.float32))
        return *(g.to(t.dtype) for g, t in zip(gradients, saved, strict=True)), None, None


def rows(q, k, v, packing: Packing, scale: float, window: int) -> torch.Tensor:
    """For CPUs: a token's bits depend on its own sequence up to it alone."""
    if window >= 0:
        raise ValueError("attn_implementation=jetrl_rows has no sliding window; use attn_implementation=sdpa")
    return _Rows.apply(q, k, v, packing, scale)


def reference(q, k, v, packing: Packing, scale: float, window: int) -> torch.Tensor:
    """One sequence after the other through torch's SDPA in the dtype of q: for tests, on any device."""
    bounds = packing.cu_seqlens.tolist()
    pieces = []
    for start, end in zip(bounds, bounds[1:], strict=False):
        heads = [t[start:end].transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
        distance = torch.arange(end - start, device=q.device)[:, None] - torch.arange(end - start, device=q.device)
        seen = (distance >= 0) & ((distance <= window) if window >= 0 else True)
        out = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale, enable_gqa=True)
        pieces.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(pieces)


BACKENDS: dict[str, Attend] = {"jetrl_fa3": fa3, "jetrl_fa2": fa2, "jetrl_varlen": varlen, "jetrl_rows": rows}
