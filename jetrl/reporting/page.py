"""The report as one HTML page: no script, no font, no image from anywhere else."""

import math
from html import escape

from jetrl import __version__
from jetrl.reporting.compare import Row, findings, limits
from jetrl.reporting.graph_verdict import Verdict
from jetrl.reporting.groups import is_label
from jetrl.reporting.measures import Spread, first_and_last
from jetrl.reporting.pictures import Picture
from jetrl.reporting.runs import Run
from jetrl.reporting.style import page_css, picture_css
from jetrl.reporting.svg import number

MISSING = "not logged"


def html_page(
    runs: list[Run], verdicts: dict[str, Verdict], table: list[Row], pictures: dict[str, list[Picture]]
) -> str:
    flows = len(table)
    title = f"{flows} flows compared over {len(runs)} runs"
    if flows == 1:
        title = f"{table[0].group.label}: {len(runs)} run{'s' * (len(runs) != 1)}"
    parts = [
        f"<h1>{escape(title)}</h1><p class='muted'>{escape(_setting(runs))}</p>",
        _list(findings(table)),
        f"<div class='cards'>{''.join(map(_card, table))}</div>",
        _list(limits(table)),
        "<h2>By flow</h2>" + _flow_table(table),
    ]
    for heading, row in pictures.items():
        parts.append(f"<h2>{escape(heading)}</h2><div class='charts'>{''.join(map(_figure, row))}</div>")
    parts.append(_phase_table(table))
    parts.append("<h2>Precision graph</h2>" + _verdict_list(table))
    parts.append("<h2>Runs</h2>" + _run_table(table))
    parts.append("<h2>Configuration differences</h2>" + _differences(runs))
    parts.append(f"<p class='muted'>jetrl {escape(__version__)}, python -m jetrl.report</p>")
    style = f"{page_css()}\n{picture_css()}\n@media (prefers-color-scheme:dark){{{picture_css(dark=True)}}}"
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{style}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _list(lines: list[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def _setting(runs: list[Run]) -> str:
    """Model, task, response length where they are the same in all runs that say."""
    keys = {
        "model": "actor_rollout_ref.model.path",
        "task": "task.name",
        "response tokens": "data.max_response_length",
        "lr": "actor_rollout_ref.actor.optim.lr",
    }
    configs = [run.flat for run in runs if run.cfg is not None]
    if not configs:
        return "VeRL metrics without a configuration: model, task and flow are not recorded"
    words = []
    for name, key in keys.items():
        found = {str(config.get(key)) for config in configs}
        if found != {"None"}:
            value = next(iter(found)) if len(found) == 1 else "differs"
            words.append(f"{name} {value.rstrip('/').rpartition('/')[2] if name == 'model' else value}")
    return " · ".join(words)


def _card(row: Row) -> str:
    before, after = _share(row.before), _share(row.after)
    accuracy = (
        f"<span class='one'>{before} →</span> <span class='one'>{after}</span>"
        if row.after.count
        else f"{before} before training"
        if row.before.count
        else MISSING
    )
    k3 = _spread(row.mismatch["k3"])
    state = row.verdict.state
    return (
        f"<div class='card'><b>{escape(row.group.label)}</b><span class='muted'>validation accuracy</span>"
        f"<div class='big'>{accuracy}</div><div>mismatch k3: {escape(k3)}{' nats' if k3 != MISSING else ''}</div>"
        f"<div>precision graph: <span class='{state.replace(' ', '-')}'>{escape(state)}</span></div>"
        f"<div class='muted'>{escape(_states(row))}</div></div>"
    )


def _states(row: Row) -> str:
    runs = row.group.runs
    if len(runs) == 1:
        return runs[0].state
    done = sum(run.finished for run in runs)
    return f"{len(runs)} seeds, {done} finished"


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


def _flow_table(table: list[Row]) -> str:
    heads = ["flow", "runs", "accuracy before", "accuracy after", "best", "difference from bf16"]
    heads += ["k3, nats", "p99 |Δ log-prob|, nats", "step, s", "tokens/s", "speed against bf16"]
    cells = []
    for row in table:
        k3, p99 = _spread(row.mismatch["k3"]), _spread(row.mismatch["p99"])
        best = MISSING if row.best is None else f"{row.best:.3f}"
        cells.append(
            [row.group.label, str(len(row.group.runs)), _share(row.before), _share(row.after), best, _difference(row)]
            + [k3, p99, _spread(row.seconds), _spread(row.tokens_per_second), _speed(row, table)]
        )
    caption = (
        "Mean ± standard deviation over seeds. Accuracy after: the last validation. Best: the highest validation of any "
        "seed. Mismatch: mean over steps. Step time and tokens/s: median over steps, validation not in it; speed: tokens/s over bf16's."
    )
    return _table(caption, heads, [[escape(cell) for cell in row] for row in cells])


def _difference(row: Row) -> str:
    if row.group.flow == "bf16":
        return "is bf16"
    d = row.difference
    if d is None:
        return "no bf16 run to compare"
    spread = f" ± {d.spread:.3f}" if d.spread is not None else ""
    return f"{d.value:+.3f}{spread} at step {d.step}"


def _speed(row: Row, table: list[Row]) -> str:
    base = next((r for r in table if r.group is (row.difference.baseline if row.difference else None)), None)
    if row.group.flow == "bf16":
        return "1"
    if base is None or not base.tokens_per_second.mean or not row.tokens_per_second.mean:
        return "-"
    return f"{row.tokens_per_second.mean / base.tokens_per_second.mean:.2f}x"


def _phase_table(table: list[Row]) -> str:
    shown = [row for row in table if row.phases]
    if not shown:
        return ""
    phases = list(dict.fromkeys(phase for row in shown for phase in row.phases))
    heads = ["phase", *(row.group.label for row in shown)]
    cells = [[phase, *(number(row.phases[phase]) if phase in row.phases else "-" for row in shown)] for phase in phases]
    cells.append(["all together", *(number(sum(row.phases.values())) for row in shown)])
    caption = "Seconds per step by phase, mean over all steps of all seeds."
    return _table(caption, heads, [[escape(cell) for cell in row] for row in cells])


def _verdict_list(table: list[Row]) -> str:
    rows = [
        [
            escape(r.group.label),
            f"<span class='{r.verdict.state.replace(' ', '-')}'>{escape(r.verdict.sentence)}</span>",
        ]
        for r in table
    ]
    return _table(
        "What jetrl.check says of each flow on the run's own model and configuration.", ["flow", "verdict"], rows
    )


def _run_table(table: list[Row]) -> str:
    heads = ["run", "flow", "seed", "state", "accuracy before", "after", "folder"]
    rows = []
    for row in table:
        for run, seed in zip(row.group.runs, row.group.seeds, strict=True):
            ends = [MISSING if v is None else f"{v:.3f}" for v in first_and_last(run)]
            state = f"{run.state} ({run.failure.partition(': ')[2]})" if run.failure and not run.finished else run.state
            rows.append([run.name, row.group.label, seed, state, *ends, str(run.path)])
    return _table("", heads, [[escape(cell) for cell in row] for row in rows], ("run", "state", "folder"))


def _differences(runs: list[Run]) -> str:
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
                f"<b>{escape(value) or '(empty)'}</b> <span class='muted'>{escape(', '.join(names))}</span>"
                for value, names in by_value.items()
            )
            rows.append([escape(key), said])
    if not rows:
        return notes + "<p>None, apart from names, paths and machine settings.</p>"
    caption = "Keys that differ; names, paths and machine settings left out."
    return notes + _table(caption, ["key", "value and runs"], rows, ("key", "value and runs"))


def _figure(picture: Picture) -> str:
    notes = " ".join(picture.notes)
    caption = f"<figcaption>{escape(notes)}</figcaption>" if notes else ""
    if picture.svg is None:
        return f"<figure><b>{escape(picture.title)}</b><figcaption>Missing: {escape(notes)}.</figcaption></figure>"
    return f"<figure>{picture.svg}{caption}</figure>"


def _share(s: Spread) -> str:
    if s.mean is None or math.isnan(s.mean):
        return _spread(s)
    return f"{s.mean:.3f} ± {s.sd:.3f}" if s.sd is not None else f"{s.mean:.3f}"


def _spread(s: Spread) -> str:
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
