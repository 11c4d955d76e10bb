"""Tables, curve and dated JSON of the learning comparison from the runs' JSON files.

python -m benchmarks.learning.report RUNS [--out FOLDER]
"""

import argparse
import datetime
import json
import statistics
from pathlib import Path

import torch

from benchmarks.harness import environment
from jetrl.reporting.png import standalone
from jetrl.reporting.svg import Curve, line_chart

# The final loss is the mean over this many last steps: single batches differ by several per cent.
LAST = 50
BAR = 0.005


def read(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def final_loss(run: dict) -> float:
    return statistics.mean(run["loss"][-LAST:])


def gaps(runs: list[dict]) -> list[dict]:
    """One row per variant: losses over seeds and their gaps to BF16 of the same seed (same weights, same batches)."""
    of = {(run["variant"], run["seed"]): run for run in runs}
    rows = []
    for variant in dict.fromkeys(run["variant"] for run in runs):
        mine = {seed: run for (name, seed), run in of.items() if name == variant and ("bf16", seed) in of}
        if not mine:
            continue
        row = {"variant": variant, "seeds": len(mine)}
        for key, value in (("train", final_loss), ("held_out", lambda run: run["held_out_loss"])):
            each = [value(run) / value(of["bf16", seed]) - 1 for seed, run in mine.items()]
            row[f"{key}_loss"] = statistics.mean(value(run) for run in mine.values())
            row[f"{key}_loss_spread"] = _spread([value(run) for run in mine.values()])
            row[f"{key}_gap"], row[f"{key}_gap_spread"] = statistics.mean(each), _spread(each)
        row["met"] = row["train_gap"] <= BAR and row["held_out_gap"] <= BAR
        rows.append(row)
    return sorted(rows, key=lambda row: (-row["seeds"], row["variant"] != "bf16", row["variant"]))


def _spread(values: list[float]) -> float | None:
    return max(values) - min(values) if len(values) > 1 else None


def loss_table(rows: list[dict]) -> str:
    lines = [
        f"| variant | seeds | loss, last {LAST} steps | spread | gap to BF16 | spread | held-out loss | gap | spread | within {BAR:.1%} |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["variant"], str(row["seeds"])]
        for key in ("train", "held_out"):
            cells += [f"{row[f'{key}_loss']:.4f}", _cell(row[f"{key}_loss_spread"], ".4f")][
                : 2 if key == "train" else 1
            ]
            cells += [f"{row[f'{key}_gap']:+.2%}", _cell(row[f"{key}_gap_spread"], ".2%")]
        lines.append("| " + " | ".join([*cells, "yes" if row["met"] else "no"]) + " |")
    return "\n".join(lines)


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def direction_table(found: dict[str, dict], variants: list[str]) -> str:
    """One line per parameter: 1 - cosine and norm ratio of each variant. found: {variant: {parameter: measures}}."""
    head = "| parameter | " + " | ".join(f"{v} 1 - cos | ratio" for v in variants) + " |"
    lines = [head, "|---" * (2 * len(variants) + 1) + "|"]
    for name in found[variants[0]]:
        cells = [f"{1 - found[v][name]['cosine']:.2e} | {found[v][name]['norm_ratio']:.4f}" for v in variants]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def curve(runs: list[dict], window: int = 10) -> str:
    """SVG: mean over seeds and `window` steps, band from the lowest to the highest seed."""
    curves = []
    for style, variant in enumerate(dict.fromkeys(run["variant"] for run in runs)):
        losses = torch.tensor([run["loss"] for run in runs if run["variant"] == variant], dtype=torch.float64)
        losses = losses[:, : losses.shape[1] // window * window].unfold(1, window, window).mean(-1)
        steps = [window * (i + 1) for i in range(losses.shape[1])]
        several = len(losses) > 1
        band = (losses.amin(0).tolist(), losses.amax(0).tolist()) if several else (None, None)
        label = f"{variant} ({len(losses)} seeds)" if several else variant
        curves.append(Curve(label, style, steps, losses.mean(0).tolist(), *band))
    return standalone(line_chart("Training loss", "step", "nats per byte", curves, log=True))


def write(folder: Path, out: Path) -> Path:
    """learning-DATE.{json,md,svg} in `out`; the path of the JSON. Raises ValueError without a BF16 run."""
    runs = read(folder)
    if not any(run["variant"] == "bf16" for run in runs):
        raise ValueError(f"{folder} holds no BF16 run to compare with")
    rows = gaps(runs)
    stem = out / f"learning-{datetime.date.today().isoformat()}"
    direction = next((run["gradients"] | {"seed": run["seed"]} for run in runs if "gradients" in run), None)
    setting = {key: runs[0][key] for key in ("steps", "tokens_per_step", "parameters", "stream_sha256")}
    data = {
        "name": "learning",
        **environment(),
        **setting,
        "bar": BAR,
        "rows": rows,
        "gradients": direction,
        "runs": runs,
    }
    for run in runs:
        run.pop("gradients", None)
        run["loss"] = [round(value, 5) for value in run["loss"]]
    stem.with_suffix(".json").write_text(json.dumps(data) + "\n")
    stem.with_suffix(".svg").write_text(curve(runs))
    text = [
        "# learning",
        "",
        *(f"- {key}: {value}" for key, value in (environment() | setting).items()),
        "",
        loss_table(rows),
    ]
    if direction:
        shown = list(direction["start"])
        for when in ("start", "end"):
            text += ["", f"Gradients against float32, {when} of training:", "", direction_table(direction[when], shown)]
    stem.with_suffix(".md").write_text("\n".join(text) + "\n")
    print(loss_table(rows))
    return stem.with_suffix(".json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    a = parser.parse_args()
    print(write(a.runs, a.out))


if __name__ == "__main__":
    main()
