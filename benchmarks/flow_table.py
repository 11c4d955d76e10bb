"""One table over finished runs of jetrl.train: accuracy before and after, mismatch, seconds.

    python -m jetrl.train -m +precision=bf16,fp8_rollout,unified_fp8
    python benchmarks/flow_table.py runs/*                      # prints; --name NAME also writes benchmarks/results/NAME-<date>

The figures are jetrl's own summary of each run's metrics file (jetrl/launch/metrics_log.py).
"""

import argparse
import datetime
import json
import platform
from dataclasses import asdict
from pathlib import Path

from harness import commit
from omegaconf import OmegaConf

from jetrl.integrations.protocol import versions
from jetrl.launch.metrics_log import read_run, summarize

RESULTS = Path(__file__).parent / "results"
COLUMNS = {
    "flow": "flow",
    "seed": "seed",
    "steps": "steps",
    "accuracy_before": "accuracy before",
    "accuracy_after": "after",
    "k3_kl": "k3 KL",
    "p99": "p99 abs Δ log-prob",
    "seconds": "seconds in steps",
}


def row(folder: Path) -> dict:
    """One run as plain values. Raises FileNotFoundError for a folder without a run in it."""
    cfg = OmegaConf.load(folder / "config.yaml")
    figures = asdict(summarize(read_run(folder / "metrics.jsonl")))
    return {"flow": cfg.flow.name, "seed": cfg.data.seed, "run": folder.name, **figures}


def markdown(rows: list[dict]) -> str:
    def cell(value: object) -> str:
        if isinstance(value, float):
            return f"{value:.3f}" if 1e-2 < abs(value) < 1 else f"{value:.3g}"
        return "-" if value is None else str(value)

    lines = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cell(r[key]) for key in COLUMNS) + " |" for r in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="run folders of jetrl.train")
    parser.add_argument("--name", help="also write NAME-<date>.json and .md to benchmarks/results")
    parser.add_argument("--command", default="", help="the command that made the runs, kept with the results")
    args = parser.parse_args()
    missing = [str(run) for run in args.runs if not (run / "config.yaml").is_file()]
    if missing:
        parser.error(f"no run of jetrl.train in {', '.join(missing)}")
    rows = [row(run) for run in args.runs]
    table = markdown(rows)
    print(table)
    if args.name:
        stamp = {"date": datetime.date.today().isoformat(), "command": args.command, "commit": commit(), **versions()}
        stamp |= {"python": platform.python_version(), "machine": platform.machine()}
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{args.name}-{stamp['date']}"
        path.with_suffix(".json").write_text(json.dumps({**stamp, "rows": rows}, indent=1) + "\n")
        described = "\n".join(f"- {key}: {value}" for key, value in stamp.items())
        path.with_suffix(".md").write_text(f"# {args.name}\n\n{described}\n\n{table}")


if __name__ == "__main__":
    main()
