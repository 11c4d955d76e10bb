"""Mismatch between rollout and trainer for several flows, at several output lengths, on the same weights.

    python benchmarks/mismatch_table.py --lengths 256,2048,8192 --sequences 12 [--fp32-carriers] [--parallel] [--seconds N]
        -- model=tiny ...

Each flow is one run of jetrl.verify: vLLM samples with the job's own engine settings, the trainer recomputes. What follows
`--` goes to every run: model, hardware, engine keys, options of jetrl.verify. Random weights (a model folder with a
config.json only) have nearly uniform log-probs; a trained model says more. --name NAME also writes benchmarks/results/NAME-<date>.json and .md, again after every flow. After --seconds what
is still running is killed; a flow whose log-probs were compared by then is in the table without its operators.
"""

import argparse
import datetime
import importlib
import json
import os
import platform
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from harness import commit

from jetrl.integrations.protocol import versions
from jetrl.launch.shareable import clean_words
from jetrl.launch.worker_entry import die_with_parent

RESULTS = Path(__file__).parent / "results"
FLOWS = "bf16,fp8_rollout,unified_fp8"
# What is computed around the linear layers, in FP32 on both sides: then what is left of the mismatch is the layers'.
_POLICY = "mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
FP32_CARRIERS = ("actor_rollout_ref.rollout.dtype=float32", f"+actor_rollout_ref.actor.fsdp_config.{_POLICY}")
FIGURES = {
    "tokens": "tokens",
    "differing_tokens": "differing",
    "k3_kl": "k3 KL",
    "abs_logprob_diff_p50": "p50 abs Δ",
    "abs_logprob_diff_p99": "p99",
    "abs_logprob_diff_max": "max",
    "token_mult_prob_error": "prob error",
}


def import_everything() -> bool:
    """Import both engines before the forks, which on a CPU takes longer than the work; whether that was done.

    Not with a GPU: importing vLLM initializes CUDA (seen on an H200), which a fork cannot use. Every step is then a
    process of its own, as in jetrl.verify.
    """
    import torch

    if torch.cuda.device_count():
        return False
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for module in (
        "transformers.models.qwen3.modeling_qwen3", "vllm.v1.engine.llm_engine", "vllm.model_executor.models.qwen3",
        "verl.workers.rollout.vllm_rollout.vllm_async_server", "verl.workers.engine_workers", "jetrl.launch.preflight",
        "jetrl.verification.rollout", "jetrl.verification.trainer",
    ):  # fmt: skip
        importlib.import_module(module)
    return True


def start(flow: str, carriers: str, args: argparse.Namespace, folder: Path) -> tuple[int, Path]:
    """A process that verifies one flow; returns its id and the file it writes its result to."""
    out = folder / f"{flow}-{carriers}.json"
    process = os.fork()
    if process == 0:
        try:
            die_with_parent()
            log = os.open(out.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            _verify(flow, carriers, args, out)
        finally:  # a fork must never return into its parent's code
            if sys.exc_info()[0] is not None:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    return process, out


def _verify(flow: str, carriers: str, args: argparse.Namespace, out: Path) -> None:
    from jetrl.verification.child import start as start_process
    from jetrl.verification.child import start_forked
    from jetrl.verification.command import prepare, verify
    from jetrl.verification.report import failures, report_lines
    from jetrl.verify import parse

    extra = FP32_CARRIERS if carriers == "fp32" else ()
    words = [f"precision={flow}", f"run.dir={out.with_suffix('')}", *args.words, *extra]
    words += [
        "--lengths",
        args.lengths,
        "--sequences",
        str(args.sequences),
        "--layer-sequences",
        str(args.layer_sequences),
        *(["--layer-tokens", str(args.layer_tokens)] if args.layer_tokens else []),
    ]
    if args.prompt_lengths:
        words += ["--prompt-lengths", args.prompt_lengths]
    options, _, words = parse([*words, *(["--mutations"] if args.mutations and "unified" in flow else [])])
    cfg, space = prepare(words, options)
    result = verify(
        cfg,
        options,
        space,
        lambda line: print(line, flush=True),
        start_forked if args.imported else start_process,
    )
    result["failures"] = failures(result, options)
    print("\n".join(report_lines(result)), flush=True)
    out.write_text(json.dumps(result, indent=1))


def rows_of(flow: str, carriers: str, result: dict) -> list[dict]:
    own = sorted({e["operator"].split(".")[-1] for e in result.get("operators", []) if e["own"]["differing"]})
    return [
        {"flow": flow, "carriers": carriers, **figures, "own": ", ".join(own)}
        for figures in result["mismatch"]["by_length"]
    ]


def markdown(rows: list[dict]) -> str:
    head = ["flow", "carriers", "output length", *FIGURES.values(), "operators that differ by themselves"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in rows:
        cells = [
            f"{r[k]:.3g}" if isinstance(r[k], float) and k != "token_mult_prob_error" else f"{r[k]}"[:9]
            for k in FIGURES
        ]
        lines.append("| " + " | ".join([r["flow"], r["carriers"], str(r["length"]), *cells, r["own"]]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flows", default=FLOWS)
    parser.add_argument("--lengths", default="256,2048,8192")
    parser.add_argument("--prompt-lengths", default="")
    parser.add_argument("--sequences", type=int, default=12)
    parser.add_argument("--layer-sequences", type=int, default=2, help="0: log-probs alone, no operators")
    parser.add_argument("--layer-tokens", type=int, help="how far, in tokens; default: jetrl.verify's own")
    parser.add_argument("--mutations", action="store_true", help="the self-test too, of unified flows")
    parser.add_argument("--fp32-carriers", action="store_true", help="each FP8 flow also with FP32 around its layers")
    parser.add_argument("--parallel", action="store_true", help="all runs at once (figures do not depend on time)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all runs together")
    parser.add_argument("--folder", type=Path, help="of the runs; default a temporary one")
    parser.add_argument("--keep-logs", type=Path, metavar="FOLDER", help="ends of the engines' logs go here")
    parser.add_argument("--name")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="mismatch-"))
    folder.mkdir(parents=True, exist_ok=True)
    results, began = {}, time.monotonic()
    jobs = [(flow, "bf16") for flow in args.flows.split(",")]
    if args.fp32_carriers:
        jobs += [(flow, "fp32") for flow in args.flows.split(",") if flow != "bf16" and "exact" not in flow]
    if args.keep_logs:
        args.keep_logs.mkdir(parents=True, exist_ok=True)
    args.imported = import_everything()
    waiting, running = list(jobs), {}
    while waiting or running:
        late = time.monotonic() - began > args.seconds
        while waiting and not late and (args.parallel or not running):
            job = waiting.pop(0)
            running[job] = start(*job, args, folder)
        for job, (process, out) in list(running.items()):
            if late:
                os.kill(process, signal.SIGKILL)  # its own child ends with it
            if os.waitpid(process, 0 if late else os.WNOHANG)[0]:
                del running[job]
                end = f"killed after {args.seconds:.0f} s" if late else "ended"
                print(f"{'-'.join(job)} {end}, {time.monotonic() - began:.0f} s", flush=True)
                _collect(job, out, args, results)
                write(results, args)
        waiting = [] if late else waiting
        time.sleep(0.2)
    print(markdown(table_rows(results)), f"{time.monotonic() - began:.0f} s", flush=True)


def _collect(job: tuple[str, str], out: Path, args: argparse.Namespace, results: dict) -> None:
    """The result of one run, whole or as far as its trainer got."""
    print(out.with_suffix(".txt").read_text()[-4000:], flush=True)
    verify = out.with_suffix("") / "verify"
    if args.keep_logs:
        for log in verify.glob("*.log"):
            (args.keep_logs / f"{out.stem}.{log.name}").write_text(log.read_text(errors="replace")[-6000:])
    for file in (out, verify / "result.json"):
        try:
            results[job] = json.loads(file.read_text())
            return
        except (FileNotFoundError, json.JSONDecodeError):  # killed before it, or while it was written
            continue


def table_rows(results: dict) -> list[dict]:
    rows = [row for job, result in results.items() for row in rows_of(*job, result)]
    return sorted(rows, key=lambda r: (r["carriers"], r["length"]))


def write(results: dict, args: argparse.Namespace) -> None:
    if not args.name:
        return
    rows = table_rows(results)
    device = next((r["device"] for r in results.values()), "")
    today = datetime.date.today().isoformat()
    record = {
        "date": today, "commit": commit(), "device": device, "host": platform.machine(), "versions": versions(),
        "command": clean_words(sys.argv[1:]), "rows": rows,
        "results": {"-".join(job): result for job, result in results.items()},
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.name}-{today}.json").write_text(json.dumps(record, indent=1) + "\n")
    (args.out / f"{args.name}-{today}.md").write_text(markdown(rows))


if __name__ == "__main__":
    main()
