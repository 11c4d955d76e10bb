"""Trainer operators around the linears: packed attention by backend, rotary, q/k norm with rotary, a token's log-prob.

    python benchmarks/bench_attention.py [--out FOLDER]

Attention: 32 query heads, 8 KV heads, head size 128, BF16, causal; forward and backward in milliseconds, eager calls
(a training step launches them so), and TFLOP/s counted as 4 * heads * size * sum(n^2 / 2) forward and 2.5 times that
backward. Row-wise operators: microseconds by CUDA graph and the share of the copy bandwidth over bytes that must move.
"""

import argparse
import importlib.util
import statistics
from functools import partial
from pathlib import Path

import jetrl_kernels.ops  # noqa: F401
import torch
from harness import copy_bandwidth, input_sets, print_table, time_calls, write_results

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


def attention_rows() -> list[dict]:
    obstacles = {
        "jetrl_fa3": fa3_obstacle(),
        "jetrl_fa2": None if importlib.util.find_spec("flash_attn") else "flash_attn is not installed",
        "jetrl_varlen": None,
    }
    rows = []
    for label, lengths in PACKS.items():
        tokens = sum(lengths)
        packing = packing_of(torch.cat([torch.arange(n, device="cuda") for n in lengths]).unsqueeze(0), 1)
        q = torch.randn(tokens, HEADS, SIZE, device="cuda", dtype=BF16).requires_grad_()
        k, v = (torch.randn(tokens, KV_HEADS, SIZE, device="cuda", dtype=BF16).requires_grad_() for _ in range(2))
        grad = torch.randn(tokens, HEADS, SIZE, device="cuda", dtype=BF16)
        flops = 4 * HEADS * SIZE * sum(n * n / 2 for n in lengths)
        for name, attend in backends.BACKENDS.items():
            if obstacles[name]:
                print(f"{name}: {obstacles[name]}")
                continue
            for deterministic in (False, True):
                torch.use_deterministic_algorithms(deterministic)
                forward = _milliseconds(partial(attend, q, k, v, packing, SIZE**-0.5, -1))
                out = attend(q, k, v, packing, SIZE**-0.5, -1)
                backward = _milliseconds(partial(torch.autograd.grad, out, (q, k, v), grad, retain_graph=True))
                torch.use_deterministic_algorithms(False)
                rows.append(
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
    return rows


def row_wise_rows() -> list[dict]:
    bandwidth = copy_bandwidth()
    jetrl = torch.ops.jetrl
    rows = []

    def measure(name, tokens, size, make, call):
        sets = [make() for _ in range(input_sets(size))]
        timing = time_calls([lambda s=s: call(*s) for s in sets])
        rows.append(
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
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    attention, row_wise = attention_rows(), row_wise_rows()
    print_table(attention)
    print_table(row_wise)
    write_results("attention", attention, args.out, row_wise=row_wise)


if __name__ == "__main__":
    main()
