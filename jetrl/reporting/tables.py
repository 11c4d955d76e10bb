"""The report's tables, as HTML: by flow, by phase, by run, and what differs between configurations."""

import math
from collections.abc import Sequence
from html import escape

from jetrl.launch.shareable import clean_text
from jetrl.reporting.compare import Row, shared_a_gpu
from jetrl.reporting.groups import is_label
from jetrl.reporting.measures import Spread, first_and_last
from jetrl.reporting.runs import Run
from jetrl.reporting.svg import number

MISSING = "not logged"
STOCHASTIC = "jetrl.optimizer.StochasticAdamW"


def _table(caption: str, heads: list[str], rows: list[list[str]], breakable: tuple[str, ...] = ()) -> str:
    """Cells are HTML already. On a narrow screen each row becomes a card, its cells named by `data-label`.

    breakable: columns of paths and keys, which may break inside a word; numbers may not.
    """
    head = "".join(f"<th>{escape(h)}</th>" for h in heads)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td data-label='{escape(h)}'><span{' class=any' * (h in breakable)}>{cell}</span></td>"
            for h, cell in zip(heads, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    label = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{label}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def flow_table(table: list[Row]) -> str:
    heads = ["flow", "runs", "accuracy before", "accuracy after", "best", "difference from bf16"]
    heads += ["k3, nats", "p99 |Δ log-prob|, nats", "step, s", "tokens/s", "speed against bf16"]
    cells = []
    for row in table:
        k3, p99 = spread_text(row.mismatch["k3"]), spread_text(row.mismatch["p99"])
        best = MISSING if row.best is None else f"{row.best:.3f}"
        cells.append(
            [
                row.group.label,
                str(len(row.group.runs)),
                share_text(row.before),
                _after(row),
                best,
                _difference(row),
            ]
            + [k3, p99, spread_text(row.seconds), spread_text(row.tokens_per_second), _speed(row, table)]
        )
    caption = (
        "Mean ± standard deviation over seeds. Accuracy after: the last validation. Best: the highest validation of any "
        "seed. Mismatch: mean over steps. Step time and tokens/s: median over steps, validation not in it; speed: tokens/s over bf16's."
    )
    return _table(caption, heads, [[escape(row[0]), *map(_numbers, row[1:])] for row in cells])


def _after(row: Row) -> str:
    fewer = 0 < row.after.count < row.before.count
    return share_text(row.after) + (f" ({row.after.count} of {row.before.count} seeds)" if fewer else "")


def _numbers(text: str) -> str:
    """A number like 1e-6 would break at its hyphen; a cell may break between words only."""
    return " ".join(f"<span class='one'>{escape(word)}</span>" for word in text.split(" "))


def _difference(row: Row) -> str:
    if row.group.flow == "bf16":
        return "is bf16"
    d = row.difference
    if d is None and row.paired:
        error = f" ± {row.paired.error:.3f}" if row.paired.error is not None else ""
        return f"{row.paired.value:+.3f}{error} in training reward, steps 1 to {row.paired.step}"
    if d is None:
        return "no bf16 run to compare"
    spread = f" ± {d.spread:.3f}" if d.spread is not None else ""
    return f"{d.value:+.3f}{spread} at step {d.step}"


def _speed(row: Row, table: list[Row]) -> str:
    base = next((r for r in table if r.group is (row.difference.baseline if row.difference else None)), None)
    if row.group.flow == "bf16":
        return "1"
    if base is None or any(shared_a_gpu(run) for run in (*row.group.runs, *base.group.runs)):
        return "-"
    if not base.tokens_per_second.mean or not row.tokens_per_second.mean:
        return "-"
    return f"{row.tokens_per_second.mean / base.tokens_per_second.mean:.2f}x"


def phase_table(table: list[Row]) -> str:
    shown = [row for row in table if row.phases]
    if not shown:
        return ""
    phases = list(dict.fromkeys(phase for row in shown for phase in row.phases))
    heads = ["phase", *(row.group.label for row in shown)]
    cells = [[phase, *(number(row.phases[phase]) if phase in row.phases else "-" for row in shown)] for phase in phases]
    cells.append(["all together", *(number(sum(row.phases.values())) for row in shown)])
    caption = "Seconds per step by phase, mean over all steps of all seeds."
    return _table(caption, heads, [[escape(cell) for cell in row] for row in cells])


def verdict_table(table: list[Row]) -> str:
    rows = [
        [
            escape(r.group.label),
            f"<span class='{r.verdict.state.replace(' ', '-')}'>{escape(clean_text(r.verdict.sentence))}</span>",
            escape(_masters(r.group.runs[0])),
        ]
        for r in table
    ]
    caption = (
        "What jetrl.check says of each flow on the run's own model and configuration, and what its optimizer owns."
    )
    return _table(caption, ["flow", "verdict", "master weights"], rows)


def _masters(run: Run) -> str:
    """As integrations/verl/masters.py says it of the live optimizer; an existing VeRL job keeps the ones it chose."""
    actor = "actor_rollout_ref.actor"
    dtype = run.flat.get(f"{actor}.fsdp_config.model_dtype")
    optimizer = ".".join(str(run.flat.get(f"{actor}.optim.{key}")) for key in ("optimizer_impl", "optimizer"))
    option = f"{actor}.optim.override_optimizer_config.bf16_stochastic_round"
    if dtype is None:
        return "not recorded"
    if dtype in ("fp32", "float32", "float"):
        return f"FP32 ({optimizer})"
    if dtype not in ("bf16", "bfloat16"):
        return f"{dtype} ({optimizer})"
    if run.flat.get(option, optimizer == STOCHASTIC) is True:
        return f"BF16, rounded stochastically ({optimizer})"
    return f"BF16, rounded to nearest: small updates are lost ({optimizer})"


def run_table(table: list[Row], unreadable: Sequence[Run] = ()) -> str:
    heads = ["run", "flow", "seed", "state", "accuracy before", "after", "folder"]
    rows = []
    for row in table:
        for run, seed in zip(row.group.runs, row.group.seeds, strict=True):
            ends = [MISSING if v is None else f"{v:.3f}" for v in first_and_last(run)]
            state = f"{run.state} ({run.failure.partition(': ')[2]})" if run.failure and not run.finished else run.state
            # A report is published: no path of this machine.
            rows.append([run.name, row.group.label, seed, clean_text(state), *ends, clean_text(str(run.path))])
    for run in unreadable:
        rows.append([run.name, "-", "-", clean_text(run.state), MISSING, MISSING, clean_text(str(run.path))])
    return _table("", heads, [[escape(cell) for cell in row] for row in rows], ("run", "state", "folder"))


def difference_table(runs: list[Run], table: list[Row]) -> str:
    """Every key that is not the same in all runs with a configuration; names, paths and machine settings left out."""
    configs = {run.name: run.flat for run in runs if run.cfg is not None}
    without = [run.name for run in runs if run.cfg is None]
    notes = f"<p>No configuration is recorded for: {escape(', '.join(without))}.</p>" if without else ""
    if len(configs) < 2:
        return notes + "<p>Fewer than two configurations: nothing to compare.</p>"
    rows = []
    for key in dict.fromkeys(k for config in configs.values() for k in config):
        by_value: dict[str, list[str]] = {}
        for name, config in configs.items():
            by_value.setdefault(str(config[key]) if key in config else "(absent)", []).append(name)
        if len(by_value) > 1 and not is_label(key):
            said = "<br>".join(
                f"<b>{escape(value) or '(empty)'}</b> <span class='muted'>{escape(_who(names, table))}</span>"
                for value, names in by_value.items()
            )
            rows.append([escape(key), said])
    if not rows:
        return notes + "<p>None, apart from names, paths and machine settings.</p>"
    caption = "Keys that differ; names, paths and machine settings left out. A flow's name stands for all its runs."
    return notes + _table(caption, ["key", "value and runs"], rows, ("key", "value and runs"))


def _who(names: list[str], table: list[Row]) -> str:
    words = []
    for row in table:
        own = [run.name for run in row.group.runs if run.name in names]
        words += [row.group.label] if len(own) == len(row.group.runs) else own
    return ", ".join(words)


def share_text(s: Spread) -> str:
    if s.mean is None or math.isnan(s.mean):
        return spread_text(s)
    return f"{s.mean:.3f} ± {s.sd:.3f}" if s.sd is not None else f"{s.mean:.3f}"


def spread_text(s: Spread) -> str:
    """Mean ± sd with the same exponent and decimals on both sides; the sd has two significant digits."""
    if s.mean is None:
        return MISSING
    if math.isnan(s.mean):
        return "NaN"
    if not s.sd:
        return number(s.mean) + (" ± 0" if s.sd == 0 else "")
    size = math.floor(math.log10(max(abs(s.mean), s.sd)))
    exponent = size if not -3 <= size < 5 else 0
    unit = 10.0**exponent
    decimals = min(6, max(0, 1 - math.floor(math.log10(s.sd / unit))))
    tail = f"e{exponent}" if exponent else ""
    return f"{s.mean / unit:.{decimals}f}{tail} ± {s.sd / unit:.{decimals}f}{tail}"
