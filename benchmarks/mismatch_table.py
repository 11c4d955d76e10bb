"""Mismatch between rollout and trainer for several flows, at several output lengths, on the same weights.

    python benchmarks/mismatch_table.py --lengths 256,2048,8192 --sequences 12 [--fp32-carriers] [--parallel] -- model=tiny ...

Each flow is one run of jetrl.verify: vLLM samples with the job's own engine settings, the trainer recomputes. What follows
`--` goes to every run: model, hardware, engine keys. Random weights (a model folder with a config.json only) have nearly
uniform log-probs; a trained model says more. --name NAME also writes benchmarks/results/NAME-<date>.json and .md.
"""

import argparse
import datetime
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import commit

from jetrl.integrations.protocol import versions

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


def start(flow: str, carriers: str, args: argparse.Namespace, folder: Path) -> tuple[subprocess.Popen, Path]:
    out = folder / f"{flow}-{carriers}.json"
    extra = FP32_CARRIERS if carriers == "fp32" else ()
    command = [
        sys.executable, "-m", "jetrl.verify", f"precision={flow}", f"run.dir={folder / out.stem}", "--json", str(out),
        "--lengths", args.lengths, "--sequences", str(args.sequences), *args.words, *extra,
    ]  # fmt: skip
    if args.prompt_lengths:
        command += ["--prompt-lengths", args.prompt_lengths]
    return subprocess.Popen(command, stdout=open(out.with_suffix(".txt"), "w"), stderr=subprocess.STDOUT), out


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
    parser.add_argument("--fp32-carriers", action="store_true", help="each FP8 flow also with FP32 around its layers")
    parser.add_argument("--parallel", action="store_true", help="all runs at once (figures do not depend on time)")
    parser.add_argument("--name")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    folder, rows, results, began = Path(tempfile.mkdtemp(prefix="mismatch-")), [], {}, time.monotonic()
    jobs = [(flow, "bf16") for flow in args.flows.split(",")]
    if args.fp32_carriers:
        jobs += [(flow, "fp32") for flow in args.flows.split(",") if flow != "bf16" and "exact" not in flow]
    running = {}
    for job in jobs:
        running[job] = start(*job, args, folder)
        if not args.parallel:
            running[job][0].wait()
    for job, (process, out) in running.items():
        process.wait()
        if not out.is_file():
            print(f"{job}: failed\n{out.with_suffix('.txt').read_text()[-2000:]}", flush=True)
            continue
        results["-".join(job)] = result = json.loads(out.read_text())
        rows += rows_of(*job, result)
    rows.sort(key=lambda r: (r["carriers"], r["length"]))
    table = markdown(rows)
    print(table, f"{time.monotonic() - began:.0f} s", flush=True)
    if args.name:
        device = next((r["device"] for r in results.values()), "")
        today = datetime.date.today().isoformat()
        record = {
            "date": today, "commit": commit(), "device": device, "host": platform.machine(), "versions": versions(),
            "command": sys.argv[1:], "rows": rows, "results": results,
        }  # fmt: skip
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"{args.name}-{today}.json").write_text(json.dumps(record, indent=1) + "\n")
        (args.out / f"{args.name}-{today}.md").write_text(table)


if __name__ == "__main__":
    main()
