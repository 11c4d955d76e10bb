"""Compile DeepGEMM's kernels for a model's layers in parallel, into DG_JIT_CACHE_DIR, before engines or trainers need them.

    python benchmarks/warm_gemms.py qwen3-8b [llama3.1-8b ... | a model's folder] [--rows 32 128 256 16384] [--train] [--processes 12] [--tensor-parallel N]

nvcc takes 3 to 5 s a kernel and an engine compiles one after another. Which kernel a row count gets is DeepGEMM's choice;
row counts of one kernel cost nothing more. --train adds the input gradients and the weight gradients.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from rollout_engines import SHAPES, config_of

from jetrl.precision.gemm_shapes import matrices


def work(jobs: list[tuple[str, int, int, int]]) -> None:
    import jetrl_kernels.ops  # noqa: F401  (defines the operators)
    import torch
    from jetrl_kernels import backends

    ops = torch.ops.jetrl
    for kind, m, n, k in jobs:
        if kind == "blocks":  # also below the rows that jetrl gives to its own kernel: vLLM's engine has no other
            a, b = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda")
            out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
            operands = (ops.quantize_tiles(a.bfloat16(), "fp32"), ops.quantize_blocks(b.bfloat16(), "fp32"), out)
            backends.deep_gemm().fp8_gemm_nt(*operands, disable_ue8m0_cast=True)
        else:
            a, b = (ops.quantize_tiles_transposed(torch.randn(k, x, device="cuda"), "fp32") for x in (m, n))
            ops.gemm_nt_accumulate(*a, *b, torch.zeros(m, n, device="cuda"))
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", help=f"{', '.join(SHAPES)}, or a folder with a config.json")
    parser.add_argument("--rows", nargs="+", type=int, default=[32, 128, 256, 16384])
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    jobs = set()
    for shape in arguments.shapes:
        file = Path(shape) / "config.json"
        config = json.loads(file.read_text()) if file.is_file() else config_of(shape)
        for n, k in matrices(config, arguments.tensor_parallel):
            jobs |= {("blocks", m, n, k) for m in arguments.rows}
            if arguments.train:
                jobs |= {("blocks", m, k, n) for m in arguments.rows}
                # wgrad, and the same with one operand in blocks (flow.train.wgrad=blocks).
                jobs |= {("tiles", n, k, max(arguments.rows)), ("blocks", n, k, max(arguments.rows))}
    jobs = sorted(jobs)
    if arguments.part is not None:
        work(jobs[arguments.part :: arguments.processes])
        return
    began = time.perf_counter()
    # A process each: DeepGEMM holds Python's lock while nvcc runs.
    count = min(arguments.processes, len(jobs))
    command = [
        sys.executable,
        __file__,
        *arguments.shapes,
        "--rows",
        *map(str, arguments.rows),
        "--processes",
        str(count),
    ]
    command += ["--tensor-parallel", str(arguments.tensor_parallel)] + ["--train"] * arguments.train
    running = [subprocess.Popen([*command, "--part", str(i)], env=os.environ) for i in range(count)]
    failed = sum(process.wait() != 0 for process in running)
    print(
        f"{len(jobs)} shapes in {time.perf_counter() - began:.1f} s, {failed} of {count} processes failed", flush=True
    )
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
