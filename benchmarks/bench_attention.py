"""Trainer operators around the linears: packed attention by backend, rotary, q/k norm with rotary, a token's log-prob.

    python benchmarks/bench_attention.py [--only backward attention row_wise] [--out FOLDER]

Attention: 32 query heads, 8 KV heads, head size 128, BF16, causal; forward and backward in milliseconds, eager calls
(a training step launches them so), and TFLOP/s counted as 4 * heads * size * sum(n^2 / 2) forward and 2.5 times that
backward. Backward kernels that could follow FA3's forward: torch's flash 2 and cuDNN's. Row-wise operators: microseconds by CUDA graph and the share of the copy bandwidth over bytes that must move.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import jetrl_kernels.ops  # noqa: F401
import torch
from harness import copy_bandwidth, input_sets, print_table, require_gpu, time_calls, write_results

from jetrl.attention import backends
from jetrl.attention.choice import fa3_obstacle
from jetrl.attention.packing import packing_of

HEADS, KV_HEADS, SIZE = 32, 8, 128
BF16 = torch.bfloat16
PACKS = {"8 x 2048": (2048,) * 8, "2 x 8192": (8192,) * 2, "32 x 512": (512,) * 32}


def _milliseconds(call, repeats: int = 10) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def attention_rows(keep) -> None:
    obstacles = {
        "jetrl_fa3": fa3_obstacle(),
        "jetrl_fa2": None if importlib.util.find_spec("flash_attn") else "flash_attn is not installed",
        "jetrl_varlen": None,
    }
    for label, lengths in PACKS.items():
        tokens = sum(lengths)
        packing = packing_of(torch.cat([torch.arange(n, device="cuda") for n in lengths]).unsqueeze(0), 1)
        q = torch.randn(tokens, HEADS, SIZE, device="cuda", dtype=BF16).requires_grad_()
        k, v = (torch.randn(tokens, KV_HEADS, SIZE, device="cuda", dtype=BF16).requires_grad_() for _ in range(2))
        grad = torch.randn(tokens, HEADS, SIZE, device="cuda", dtype=BF16)
        flops = 4 * HEADS * SIZE * sum(n * n / 2 for n in lengths)
        for name, obstacle in obstacles.items():
            attend = backends.BACKENDS[name]
            if obstacle:
                print(f"{name}: {obstacle}")
                continue
            for deterministic in (False, True):
                torch.use_deterministic_algorithms(deterministic)
                forward = _milliseconds(partial(attend, q, k, v, packing, SIZE**-0.5, -1))
                out = attend(q, k, v, packing, SIZE**-0.5, -1)
                backward = _milliseconds(partial(torch.autograd.grad, out, (q, k, v), grad, retain_graph=True))
                torch.use_deterministic_algorithms(False)
                keep(
                    {
                        "pack": label,
                        "backend": name,
                        "deterministic": deterministic,
                        "forward_ms": forward,
                        "backward_ms": backward,
                        "forward_tflops": flops / forward / 1e9,
                        "backward_tflops": 2.5 * flops / backward / 1e9,
                    }
                )


def _inputs(lengths: tuple[int, ...], heads: int = HEADS, kv_heads: int = KV_HEADS):
    """q, k, v, gradient of the output, and where the sequences are."""
    tokens = sum(lengths)
    generator = torch.Generator("cuda").manual_seed(0)
    q, grad = (torch.randn(tokens, heads, SIZE, device="cuda", dtype=BF16, generator=generator) for _ in range(2))
    k, v = (torch.randn(tokens, kv_heads, SIZE, device="cuda", dtype=BF16, generator=generator) for _ in range(2))
    positions = torch.cat([torch.arange(n, device="cuda") for n in lengths]).unsqueeze(0)
    return q, k, v, grad, packing_of(positions, 1)


def _fa3_forward(q, k, v, packing):
    """FA3's output (T, H, D) and log-sum-exp (H, T), as the trainer keeps them."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    cu, longest = packing.cu_seqlens, packing.longest
    return flash_attn_varlen_func(
        q, k, v, max_seqlen_q=longest, cu_seqlens_q=cu, max_seqlen_k=longest, cu_seqlens_k=cu, softmax_scale=SIZE**-0.5,
        causal=True, return_softmax_lse=True, num_splits=1, fa_version=3,
    )  # fmt: skip


def _seed(device) -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


def _flash2(q, k, v, out, lse, grad, packing):
    cu, longest = packing.cu_seqlens, packing.longest
    seed, unused = (torch.zeros(2, dtype=torch.uint64, device=q.device) for _ in range(2))
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, cu, cu, longest, longest, 0.0, True, seed, unused, scale=SIZE**-0.5
    )


def _cudnn_packed(q, k, v, out, lse, grad, packing):
    """cuDNN's backward for packed sequences; its log-sum-exp has a row for each token. (T, H, D), as torch 2.11 passes them
    on; torch reads the longest sequence off dimension 2, so an answer that is wrong is what the error column is for."""
    cu, longest = packing.cu_seqlens, packing.longest
    return torch.ops.aten._cudnn_attention_backward(
        grad, q, k, v, out, lse.t().contiguous().unsqueeze(-1), _seed(q.device), _seed(q.device), None, cu, cu,
        longest, longest, 0.0, True, scale=SIZE**-0.5,
    )  # fmt: skip


def _cudnn_rows(repeat: bool):
    """cuDNN's backward for a batch of equally long sequences, (B, H, S, D) with the strides of (B, S, H, D).

    repeat: K and V repeated for every query head, and their gradients summed, where cuDNN refuses shared heads.
    """

    def backward(q, k, v, out, lse, grad, packing):
        batch, length = len(packing.cu_seqlens) - 1, packing.longest
        if batch * length != len(q):
            raise ValueError("sequences of different lengths")
        group = q.shape[1] // k.shape[1] if repeat else 1
        kr, vr = (t.repeat_interleave(group, 1) if repeat else t for t in (k, v))
        rows = [t.unflatten(0, (batch, length)).transpose(1, 2) for t in (grad, q, kr, vr, out)]
        stats = lse.unflatten(1, (batch, length)).transpose(0, 1).contiguous().unsqueeze(-1)  # (B, H, S, 1)
        dq, dk, dv = torch.ops.aten._cudnn_attention_backward(
            *rows, stats, _seed(q.device), _seed(q.device), None, None, None, length, length, 0.0, True,
            scale=SIZE**-0.5,
        )  # fmt: skip
        flat = [t.transpose(1, 2).flatten(0, 1) for t in (dq, dk, dv)]
        summed = [t.unflatten(1, (-1, group)).float().sum(2).to(t.dtype) if repeat else t for t in flat[1:]]
        return flat[0], *summed

    return backward


def _cudnn_nested(q, k, v, out, lse, grad, packing):
    """Packed sequences by torch's public attention on nested tensors, K and V repeated: forward and backward cuDNN's own.

    out and lse are not used: it says what cuDNN takes for packed sequences where nothing but its own forward fits.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    group, longest = q.shape[1] // k.shape[1], packing.longest
    parts = (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    nested = [
        torch.nested.nested_tensor_from_jagged(t, packing.cu_seqlens.long(), max_seqlen=longest).requires_grad_()
        for t in parts
    ]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        y = torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in nested), is_causal=True, scale=SIZE**-0.5
        )
    dq, dk, dv = (t.values() for t in torch.autograd.grad(y.transpose(1, 2).values(), nested, grad))
    return dq, *(t.unflatten(1, (-1, group)).float().sum(2).to(t.dtype) for t in (dk, dv))


BACKWARDS = {
    "torch flash 2, packed": _flash2,
    "cuDNN, equal lengths": _cudnn_rows(repeat=False),
    "cuDNN, equal lengths, K and V repeated": _cudnn_rows(repeat=True),
    "cuDNN, nested, with its own forward": _cudnn_nested,
    "cuDNN, packed": _cudnn_packed,
}
# Lengths of the comparison with float64: equal ones beyond one tile, and mixed ones.
SMALL = {"2 x 300": (300, 300), "300 + 77 + 129": (300, 77, 129)}


def _float64(q, k, v, grad, packing) -> tuple[torch.Tensor, ...]:
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    out = backends.reference(*leaves, packing, SIZE**-0.5, -1)
    return torch.autograd.grad(out, leaves, grad.double())


def backward_rows(keep) -> None:
    """Every kernel in a process of its own: one of cuDNN's ended its process with a segmentation fault. keep: gets every row."""
    for name in BACKWARDS:
        done = subprocess.run([sys.executable, __file__, "--kernel", name], stdout=subprocess.PIPE, text=True)
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode:
            rows.append({"backward": name, "deterministic": bool(rows), "ended": f"exit code {done.returncode}"})
        for row in rows:
            print(row, flush=True)
            keep(row)


def measure_backward(name: str) -> None:
    """One kernel fed with FA3's output and log-sum-exp: error, determinism, milliseconds; a JSON line a row.

    error: largest over dq, dk, dv of max |difference| / max |gradient|, against float64. What a kernel refuses is its row.
    """
    backward = BACKWARDS[name]
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        row = {"backward": name, "deterministic": deterministic}
        for label, lengths in SMALL.items():
            try:
                row |= _checked(backward, lengths, label)
            except Exception as e:  # noqa: BLE001  what a build of torch or cuDNN refuses is the finding
                row[f"error {label}"] = _sentence(e)
        for label in ("8 x 2048", "2 x 8192"):
            try:
                q, k, v, grad, packing = _inputs(PACKS[label])
                out, lse = _fa3_forward(q, k, v, packing)
                row[f"ms {label}"] = _milliseconds(partial(backward, q, k, v, out, lse, grad, packing))
            except Exception as e:  # noqa: BLE001
                row[f"ms {label}"] = _sentence(e)
        print(json.dumps(row), flush=True)


def _checked(backward, lengths: tuple[int, ...], label: str) -> dict:
    q, k, v, grad, packing = _inputs(lengths, 8, 2)
    out, lse = _fa3_forward(q, k, v, packing)
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)  # what is compared with needs cuBLAS, which refuses it without a setting
    exact = _float64(q, k, v, grad, packing)
    torch.use_deterministic_algorithms(deterministic)
    got, again = (backward(q, k, v, out, lse, grad, packing) for _ in range(2))
    errors = [(g.double() - e).abs().max() / e.abs().max() for g, e in zip(got, exact, strict=True)]
    same = all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    return {f"error {label}": max(errors).item(), f"same bits again {label}": same}


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def row_wise_rows(keep) -> None:
    bandwidth = copy_bandwidth()
    jetrl = torch.ops.jetrl

    def measure(name, tokens, size, make, call):
        sets = [make() for _ in range(input_sets(size))]
        timing = time_calls([lambda s=s: call(*s) for s in sets])
        keep(
            {
                "operator": name,
                "tokens": tokens,
                "us": timing.us,
                "of_copy": size / (timing.us * 1e-6) / bandwidth,
                "spread": timing.spread,
            }
        )

    for tokens in (32, 256, 16384):
        width = (HEADS + 2 * KV_HEADS) * SIZE

        def heads(tokens=tokens, width=width):
            merged = torch.randn(tokens, width, device="cuda", dtype=BF16)
            q = merged[:, : HEADS * SIZE].view(tokens, HEADS, SIZE)
            k = merged[:, HEADS * SIZE : (HEADS + KV_HEADS) * SIZE].view(tokens, KV_HEADS, SIZE)
            angle = torch.rand(tokens, SIZE // 2, device="cuda")
            return q, k, angle.cos().to(BF16), angle.sin().to(BF16)

        moved = 2 * tokens * (HEADS + KV_HEADS) * SIZE * 2
        weight = torch.randn(SIZE, device="cuda", dtype=BF16)
        measure("rotary", tokens, moved, heads, lambda q, k, c, s: jetrl.rotary(q, k, c, s, None, False))
        measure(
            "q/k norm + rotary, one kernel", tokens, moved, heads,
            lambda q, k, c, s, w=weight: jetrl.qk_norm_rotary(q, k, w, w, 1e-6, c, s, None),
        )  # fmt: skip
        measure(
            "q norm, k norm, rotary", tokens, moved, heads,
            lambda q, k, c, s, w=weight: jetrl.rotary(
                *(jetrl.rms_norm(x.reshape(-1, SIZE), None, w, 1e-6)[0].view(x.shape) for x in (q, k)), c, s, None, False
            ),
        )  # fmt: skip
    vocab = 151936
    for tokens in (1, 32, 256, 2048):

        def logits(tokens=tokens):
            ids = torch.randint(0, vocab, (tokens,), device="cuda")
            return torch.randn(tokens, vocab, device="cuda", dtype=BF16), ids, torch.ones(tokens, device="cuda")

        size = tokens * vocab * 2
        measure("token_logprobs", tokens, size, logits, lambda x, i, t: jetrl.token_logprobs(x, i, t, vocab))
        measure(
            "log_softmax in FP32, gather (torch)", tokens, size, logits,
            lambda x, i, t: torch.log_softmax(x, -1, dtype=torch.float32).gather(1, i[:, None]),
        )  # fmt: skip
        lse, grad = torch.full((tokens,), 13.0, device="cuda"), torch.ones(tokens, device="cuda")
        measure(
            "token_logprobs_backward", tokens, 2 * size, logits,
            lambda x, i, t, lse=lse, g=grad: jetrl.token_logprobs_backward(g, x, i, t, lse, vocab),
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("backward", "attention", "row_wise"), nargs="+", help="default: all")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kernel", choices=BACKWARDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    require_gpu()  # each row would keep its absence as what its kernel answered
    if args.kernel:
        measure_backward(args.kernel)
        return
    found: dict[str, list[dict]] = {"attention": [], "row_wise": [], "backward": []}

    def keep(part: str, row: dict) -> None:
        found[part].append(row)
        write_results("attention", found["attention"], args.out, row_wise=found["row_wise"], backward=found["backward"])

    for part, measure in (("attention", attention_rows), ("row_wise", row_wise_rows), ("backward", backward_rows)):
        if args.only is None or part in args.only:
            measure(partial(keep, part))
            print_table(found[part])


if __name__ == "__main__":
    main()
