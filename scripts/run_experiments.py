"""Runs an experiment's flows and seeds, several at a time on one GPU, and keeps what the report needs.

    python scripts/run_experiments.py chain_long --side-by-side 4 --keep benchmarks/results/runs/chain_long -- task.length=1024
    python -m jetrl.report benchmarks/results/runs/chain_long

Every run is a `python -m jetrl.train` of its own, with its own Ray instance (own temporary folder, ports chosen by the
system), so side by side means: one GPU, N trainers and N vLLM engines, none waiting for another. They share the GPU's time
and the host's cores: learning curves and mismatch are unaffected, seconds are not comparable with a run that had the
machine for itself (the kept record says how many ran). Order: all flows of the first seed, then of the next.

The same command goes on where it stopped: finished runs are skipped. Results add up: a run's record (configuration,
metrics, command, seeds, versions, GPU) goes to a folder of its own under --keep, without this machine's paths and without
credentials. Other words for a run that is there already (another task.length) make another run, named `...-2`.
"""

import argparse
import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from jetrl.errors import UserError
from jetrl.launch.args import closest, options
from jetrl.launch.job import CONFIG
from jetrl.launch.metrics_log import figures, read_run, summarize
from jetrl.launch.provenance import STARTS
from jetrl.launch.shareable import clean, clean_words
from jetrl.launch.wiring import METRICS
from jetrl.launch.worker_entry import FAILURE
from jetrl.reporting.graph_verdict import MODEL
from jetrl.reporting.runs import load_runs

# In the order in which they matter.
FLOWS = {
    "bf16": ("precision=bf16",),
    "fp8_rollout": ("precision=fp8_rollout",),
    "fp8_vllm": ("precision=fp8_vllm",),
    "unified_fp8": ("precision=unified_fp8",),
    "fp8_rollout_tis": ("precision=fp8_rollout", "algorithm=grpo_tis"),
    "unified_fp8_tis": ("precision=unified_fp8", "algorithm=grpo_tis"),
    "unified_fp8_pow2": ("precision=unified_fp8_pow2",),
    "unified_exact": ("precision=unified_exact",),
}
MAIN_FLOWS = ("bf16", "fp8_rollout", "fp8_vllm", "unified_fp8")
# Of VeRL's hundred metrics a step, those that say something about learning, mismatch, clipping, time and memory.
KEPT = re.compile(
    r"val-core/|critic/(rewards|score)/mean|response_length/(mean|max|clip_ratio)|mismatch/|rollout_corr/|actor/|perf/|timing_s/"
)
POLL_SECONDS = 1.0
# Beside a kept run's metrics: the words that made it. The same words mean the same run.
WORDS = "words.json"
# Simultaneous starts of Ray pick the same ports now and then.
STAGGER_SECONDS = 3.0
INTERRUPT_SECONDS = 40.0


@dataclass
class Run:
    """One jetrl.train: its folder's name, its words, and the process once it is started."""

    name: str
    words: tuple[str, ...]
    process: subprocess.Popen | None = None
    temporary: str | None = None
    began: float = field(default=0.0)


def planned(experiment: str, flows: list[str], seeds: list[int], extra: list[str], keep: Path) -> list[Run]:
    """One run for each flow and seed, named so that runs of other words that were kept before stay as they are."""
    runs = []
    for seed in seeds:
        for flow in flows:
            words = (f"experiment={experiment}", *FLOWS[flow], f"data.seed={seed}", *extra)
            runs.append(Run(free_name(f"{experiment}-{flow}-seed{seed}", words, keep), words))
    return runs


def free_name(name: str, words: tuple[str, ...], keep: Path) -> str:
    """`name`, `name-2`, ...: the first that is not kept yet, or that was made by the same words."""
    tries = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    return next(each for each in tries if not (keep / each).is_dir() or kept_words(keep / each) == clean_words(words))


def kept_words(folder: Path) -> list[str] | None:
    file = folder / WORDS
    return json.loads(file.read_text()) if file.is_file() else None


def is_finished(folder: Path) -> bool:
    """Whether a kept run has done all its steps."""
    if not (folder / METRICS).is_file() or not (folder / CONFIG).is_file():
        return False
    try:
        return load_runs([str(folder)])[0][0].finished
    except UserError:  # metrics without a line in them yet
        return False


def start(run: Run, root: Path, log: Path) -> None:
    # Ray's sockets lie in it, and the path of a Unix socket has at most 107 characters.
    run.temporary = tempfile.mkdtemp(prefix="jx", dir="/tmp")
    words = [*run.words, f"run.name={run.name}", f"run.dir={root / run.name}"]
    words += [f"+ray_kwargs.ray_init._temp_dir={run.temporary}"]
    run.began = time.monotonic()
    with log.open("ab") as output:
        run.process = subprocess.Popen(
            [sys.executable, "-m", "jetrl.train", *words],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def keep(run: Run, root: Path, target: Path, side_by_side: int) -> dict:
    """Copy what the report needs, small, without this machine's paths and without credentials; returns the run's record."""
    folder, kept = root / run.name, target / run.name
    kept.mkdir(parents=True, exist_ok=True)
    names = {str(root.absolute()): "runs", str(run.temporary): "ray"}
    (kept / WORDS).write_text(json.dumps(clean_words(run.words)) + "\n")
    if (folder / CONFIG).is_file():
        config = clean(yaml.safe_load((folder / CONFIG).read_text()), names)
        (kept / CONFIG).write_text(yaml.safe_dump(config, sort_keys=False))
        keep_model(folder / CONFIG, kept / MODEL)
    for name in (STARTS, FAILURE):
        if (folder / name).is_file():
            lines = [json.dumps(clean(json.loads(line), names)) for line in (folder / name).read_text().splitlines()]
            (kept / name).write_text("".join(f"{line}\n" for line in lines))
        else:
            (kept / name).unlink(missing_ok=True)  # an earlier attempt's
    steps = read_run(folder / METRICS) if (folder / METRICS).is_file() else {}
    lines = [
        json.dumps({"step": step, "data": {k: _rounded(v) for k, v in data.items() if KEPT.match(k)}})
        for step, data in steps.items()
    ]
    (kept / METRICS).write_text("".join(f"{line}\n" for line in lines))
    summary = summarize(steps)
    record = {
        "run": run.name,
        "words": clean_words(run.words),
        "exit": run.process.returncode,
        "seconds": round(time.monotonic() - run.began, 1),
        "side_by_side": side_by_side,
        "steps": summary.steps,
        "accuracy_before": summary.accuracy_before,
        "accuracy_after": summary.accuracy_after,
        "k3_kl": summary.k3_kl,
        "k3_kl_by_step": {step: _rounded(figures(data).k3_kl) for step, data in steps.items()},
    }
    with (kept / "records.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    return record


def keep_model(config: Path, target: Path) -> None:
    """The model's config.json, from which the report says whether the flow is unified; a model of the hub has none here."""
    model = OmegaConf.select(OmegaConf.load(config), "actor_rollout_ref.model.path")
    source = Path(str(model)) / "config.json"
    if source.is_file():
        target.mkdir(exist_ok=True)
        (target / "config.json").write_text(json.dumps(clean(json.loads(source.read_text())), indent=1) + "\n")


def _rounded(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.6g}")


def run_all(runs: list[Run], args: argparse.Namespace) -> list[dict]:
    """Runs at most args.side_by_side at once until all have ended or the time is over; returns their records."""
    waiting, going, records = list(runs), [], []
    deadline = None if args.seconds is None else time.monotonic() + args.seconds
    try:
        while waiting or going:
            if deadline is not None and time.monotonic() > deadline:
                print("time is over: stopping what runs", flush=True)
                break
            if waiting and len(going) < args.side_by_side:
                run = waiting.pop(0)
                start(run, args.out, args.out / f"{run.name}.log")
                going.append(run)
                print(f"started  {run.name}", flush=True)
                time.sleep(STAGGER_SECONDS)
            for run in [run for run in going if run.process.poll() is not None]:
                going.remove(run)
                records.append(finish(run, args))
            time.sleep(POLL_SECONDS)
    finally:
        stop(going)
        records += [finish(run, args) for run in going]
    return records


def stop(runs: list[Run]) -> None:
    """SIGTERM to each, which jetrl.train takes as Ctrl-C; together, so that it takes as long as the slowest."""
    for run in runs:
        run.process.send_signal(signal.SIGTERM)
    end = time.monotonic() + INTERRUPT_SECONDS
    for run in runs:
        try:
            run.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            run.process.kill()
            run.process.wait()


def finish(run: Run, args: argparse.Namespace) -> dict:
    record = keep(run, args.out, args.keep, args.side_by_side)
    shutil.rmtree(run.temporary, ignore_errors=True)  # Ray's last processes may still be writing
    shown = {key: value for key, value in record.items() if key not in ("words", "k3_kl_by_step")}
    print("ended    " + json.dumps(shown), flush=True)
    return record


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment", help="a name from configs/experiment")
    parser.add_argument("--flows", default=",".join(MAIN_FLOWS), help=f"comma list of {', '.join(FLOWS)}, or all")
    parser.add_argument("--seeds", default="0,1,2", help="comma list")
    parser.add_argument("--side-by-side", type=int, default=1, metavar="N", help="runs at once on this GPU")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where the runs live")
    parser.add_argument("--keep", type=Path, help="where records go; default <out>/kept/<experiment>")
    parser.add_argument("--seconds", type=float, help="stop then, keeping what there is")
    parser.epilog = "after --: more words for jetrl.train, as in -- task.length=1024"
    # argparse gives a trailing list of words nothing when options stand before it.
    argv = sys.argv[1:] if argv is None else argv
    split = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:split])
    args.overrides = argv[split + 1 :]
    args.flows = list(FLOWS) if args.flows == "all" else args.flows.split(",")
    experiments = options("experiment")
    if args.experiment not in experiments:
        near = closest(args.experiment, experiments)
        parser.error(f"experiment {args.experiment} is unknown{near}; allowed: {', '.join(experiments)}")
    unknown = [flow for flow in args.flows if flow not in FLOWS]
    if unknown:
        parser.error(f"--flows {unknown[0]} is unknown; allowed: {', '.join(FLOWS)}, all")
    if not re.fullmatch(r"\d+(,\d+)*", args.seeds):
        parser.error(f"--seeds {args.seeds} must be a comma list of whole numbers")
    args.seeds = list(dict.fromkeys(int(seed) for seed in args.seeds.split(",")))
    args.flows = list(dict.fromkeys(args.flows))  # a flow named twice would be two runs in one folder
    if args.side_by_side < 1:
        parser.error(f"--side-by-side {args.side_by_side} must be at least 1")
    if args.seconds is not None and args.seconds <= 0:
        parser.error(f"--seconds {args.seconds} must be above 0")
    args.keep = args.keep or args.out / "kept" / args.experiment
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    chosen = any(word.partition("=")[0].lstrip("+") == "hardware" for word in args.overrides)
    extra = [*(["hardware=side_by_side"] if args.side_by_side > 1 and not chosen else []), *args.overrides]
    args.out.mkdir(parents=True, exist_ok=True)
    args.keep.mkdir(parents=True, exist_ok=True)
    runs = planned(args.experiment, args.flows, args.seeds, extra, args.keep)
    done = [run for run in runs if is_finished(args.keep / run.name)]
    for run in done:
        print(f"finished {run.name}: skipped (delete {args.keep / run.name} to run it again)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`, so that no run outlives this script
    records = run_all([run for run in runs if run not in done], args)
    return 0 if all(record["exit"] == 0 for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
