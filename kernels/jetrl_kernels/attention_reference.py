"""Causal attention of which every sum has one written order, for CPUs: a token's bits depend on its own keys alone.

A matrix product, a softmax or a plain sum over the keys would add in an order that depends on how many keys a batch has.
Here only elementwise products and sums are taken: over a head in a binary tree, over the keys in trees of BLOCK and then
block after block, where blocks beyond a token's last key add an exact zero. Much slower than any kernel; meant for tests.
"""

import torch
import torch.nn.functional as F

BLOCK = 16
# Elements of the largest intermediate, queries x heads x keys x head size.
CHUNK_ELEMENTS = 1 << 25


def attend_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(q k^T scale) v over the first `seen[t]` keys of token t, float32 inside: (T, H, D) in the dtype of q.

    q (T, H, D), k and v (L, Hkv, D) with Hkv dividing H, seen (T) integers from 1 to L.
    """
    tokens, heads, size = q.shape
    keys = -(-k.shape[0] // BLOCK) * BLOCK
    k, v = (F.pad(t.to(torch.float32), (0, 0, 0, 0, 0, keys - t.shape[0])) for t in (k, v))
    # (1, H, keys, D)
    k, v = (t.repeat_interleave(heads // t.shape[1], dim=1).transpose(0, 1).unsqueeze(0) for t in (k, v))
    step = max(CHUNK_ELEMENTS // (heads * keys * size), 1)
    pieces = [
        _attend(q[i : i + step].to(torch.float32), k, v, seen[i : i + step], scale) for i in range(0, tokens, step)
    ]
    return torch.cat(pieces).to(q.dtype) if pieces else torch.empty_like(q)


def _attend(q, k, v, seen, scale):
    tokens, heads, size = q.shape
    keys = k.shape[2]
    visible = torch.arange(keys, device=q.device) < seen[:, None, None]
    scores = _tree(q.unsqueeze(2) * k) * scale
    scores = scores.masked_fill(~visible, float("-inf"))
    p = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = _by_blocks(p.unsqueeze(-1), tokens, heads, 1)
    return _by_blocks(p.unsqueeze(-1) * v, tokens, heads, size) / total


def _by_blocks(x: torch.Tensor, tokens: int, heads: int, size: int) -> torch.Tensor:
    """Sum over the keys of (T, H, keys, size): a tree over each block, then the blocks in order."""
    blocks = _tree(x.reshape(tokens, heads, -1, BLOCK, size).transpose(-1, -2))
    total = blocks[:, :, 0]
    for i in range(1, blocks.shape[2]):
        total = total + blocks[:, :, i]
    return total


def _tree(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, its upper half added to its lower half until one is left."""
    n = 1 << (x.shape[-1] - 1).bit_length()
    x = F.pad(x, (0, n - x.shape[-1])) if n != x.shape[-1] else x
    while n > 1:
        n //= 2
        x = x[..., :n] + x[..., n:]
    return x.squeeze(-1)
