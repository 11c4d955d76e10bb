"""`python -m jetrl.warm`: compile a job's GEMM kernels before it runs.

DeepGEMM compiles a kernel when it is first needed, for 3 to 5 s each, in the middle of a rollout or an update: single steps of FP8
jobs, by inference those in which a batch had a size for the first time, took 7 to 28 s longer on an H200. The kernels are kept on
disk (DG_JIT_CACHE_DIR, else ~/.deep_gemm), so one run of this command serves every later job of that shape.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from jetrl.command import SentenceParser, run_command
from jetrl.errors import JobError, UserError

USAGE = """\
python -m jetrl.warm [--processes N] [group=name ...] [key=value ...]
       python -m jetrl.warm [--processes N] verl [overrides of an existing VeRL job ...]

Compiles the FP8 GEMM kernels of the job that jetrl.train would run with the same words, for every batch size that it can meet.
Exit code: 0; 1 when a kernel did not compile; 2 on bad input.
"""


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    return run_command(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: list[str]) -> int:
    parser = SentenceParser(prog="python -m jetrl.warm", usage=USAGE, allow_abbrev=False)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--processes", type=int, default=cores, help="compilers at once; default: the cores, %(default)s"
    )
    options, words = parser.parse_known_args(argv)
    if options.processes < 1:
        raise UserError(f"--processes={options.processes} must be at least 1")
    unknown = next((word for word in words if word.startswith("-")), None)
    if unknown is not None:
        raise UserError(f"{unknown} is unknown; allowed: --processes N and key=value overrides")
    found, gemm = plan(words)
    backend = _backend(gemm)
    if backend != "deepgemm":
        print(
            f"nothing to compile beforehand: the GEMM backend is {backend} here, and this compiles DeepGEMM's kernels"
        )
        return 0
    cache = Path(os.environ.get("DG_JIT_CACHE_DIR") or Path.home() / ".deep_gemm")
    before, began = _kernels(cache), time.monotonic()
    compile_all(found, options.processes, "cuda")
    print(
        f"{len(found)} products, {_kernels(cache) - before} new kernels in {time.monotonic() - began:.0f} s; kept in {cache}"
    )
    return 0


def plan(words: list[str]):
    """(products of the job that the words make, its key `gemm`). Raises UserError where it has none."""
    from jetrl.check import compose_jetrl, compose_verl
    from jetrl.launch.model_files import check_sizes
    from jetrl.precision.architectures import load_config
    from jetrl.precision.gemm_shapes import products
    from jetrl.precision.job import micro_batch_tokens, read_job, whole_number
    from jetrl.settings import engine_settings

    cfg = compose_verl(words[1:]) if words and words[0] == "verl" else compose_jetrl(words)
    job = read_job(cfg)
    hf_config = load_config(job.model_path)[0].to_dict()
    check_sizes(hf_config)
    # Log-probs have limits of their own, and VeRL lets the engine's own key have precedence over its own.
    tokens = max(micro_batch_tokens(cfg, role) for role in ("actor", "rollout", "ref"))
    rollout = "actor_rollout_ref.rollout"
    batched = whole_number(
        cfg, f"{rollout}.engine_kwargs.vllm.max_num_batched_tokens", f"{rollout}.max_num_batched_tokens"
    )
    found = products(hf_config, job.train, job.rollout, tokens, batched, job.tensor_parallel)
    if not found:
        raise UserError(f"precision={job.flow} has no FP8 products of jetrl's; choose unified_fp8, or another FP8 flow")
    return found, engine_settings(cfg.actor_rollout_ref.model.override_config).gemm


def _backend(gemm: str) -> str:
    from jetrl.gemm_backend import check_gemm

    backend = check_gemm(gemm)["gemm"]
    if backend == "reference":
        raise UserError(
            "no GPU is visible: GEMM kernels are compiled on the kind of GPU that runs them; start this there"
        )
    return backend


def _kernels(cache: Path) -> int:
    return sum(1 for _ in cache.rglob("kernel.cubin"))


def compile_all(found: list, processes: int, device: str) -> None:
    """A process for each product, `processes` at once: DeepGEMM holds Python's lock while its compiler runs. Raises JobError."""
    waiting, running, failed = [json.dumps(asdict(product)) for product in found], {}, []
    while waiting or running:
        while waiting and len(running) < processes:
            product = waiting.pop(0)
            command = [sys.executable, "-m", "jetrl.gemm_warmup", device, product]
            errors = tempfile.TemporaryFile("w+")  # a pipe that nobody reads holds 64 KiB, then the process waits
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
            running[process] = product, errors
        for process in [p for p in running if p.poll() is not None]:
            product, errors = running.pop(process)
            with errors:
                errors.seek(0)
                last = (errors.read().strip().splitlines() or ["no message"])[-1]
            if process.returncode:
                failed.append(f"{product}: {last}")
        time.sleep(0.05)
    if failed:
        raise JobError(f"{len(failed)} of {len(found)} products did not compile ({failed[0]})")


if __name__ == "__main__":
    sys.exit(main())
