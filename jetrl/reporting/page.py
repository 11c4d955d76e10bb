"""The report as one HTML page: no script, no font, no image from anywhere else."""

from collections.abc import Sequence
from html import escape

from jetrl import __version__
from jetrl.reporting.compare import Row, findings, limits
from jetrl.reporting.groups import NO_FLOW
from jetrl.reporting.pictures import Picture
from jetrl.reporting.runs import Run
from jetrl.reporting.style import page_css, picture_css
from jetrl.reporting.tables import (
    MISSING,
    difference_table,
    flow_table,
    phase_table,
    run_table,
    share_text,
    spread_text,
    verdict_table,
)


def html_page(
    runs: list[Run], table: list[Row], pictures: dict[str, list[Picture]], unreadable: Sequence[Run] = ()
) -> str:
    """runs: those in the table and the pictures. unreadable: listed with what is wrong with them."""
    flows = len(table)
    title = f"{flows} {'flows' if len({row.group.flow for row in table}) == flows else 'settings'} compared, {len(runs)} runs"
    if flows == 1:
        title = f"{table[0].group.label}: {len(runs)} run{'s' * (len(runs) != 1)}"
    parts = [
        f"<h1>{escape(title)}</h1><p class='muted'>{escape(_setting(runs))}</p>",
        _list(findings(table)),
        f"<div class='cards'>{''.join(map(_card, table))}</div>",
        _list(limits(table)),
        "<h2>By flow</h2>" + flow_table(table),
    ]
    for heading, row in pictures.items():
        parts.append(f"<h2>{escape(heading)}</h2><div class='charts'>{''.join(map(_figure, row))}</div>")
    parts.append(phase_table(table))
    parts.append("<h2>Precision graph</h2>" + verdict_table(table))
    parts.append("<h2>Runs</h2>" + run_table(table, unreadable))
    parts.append("<h2>Configuration differences</h2>" + difference_table(runs, table))
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
    before, after = share_text(row.before), share_text(row.after)
    accuracy = (
        f"<span class='one'>{before} →</span> <span class='one'>{after}</span>{_fewer(row)}"
        if row.after.count
        else f"{before} before training"
        if row.before.count
        else MISSING
    )
    k3 = spread_text(row.mismatch["k3"])
    state = row.verdict.state
    flow = "" if row.group.flow else f"<div class='muted'>{NO_FLOW}</div>"
    return (
        f"<div class='card'><b>{escape(row.group.label)}</b>{flow}<span class='muted'>validation accuracy</span>"
        f"<div class='big'>{accuracy}</div><div>mismatch k3: {escape(k3)}{' nats' if k3 != MISSING else ''}</div>"
        f"<div>precision graph: <span class='{state.replace(' ', '-')}'>{escape(state)}</span></div>"
        f"<div class='muted'>{escape(_states(row))}</div></div>"
    )


def _fewer(row: Row) -> str:
    """The arrow goes from one set of seeds to a smaller one where some broke off before a second validation."""
    after, before = row.after.count, row.before.count
    return f" <span class='muted one'>({after} of {before} seeds)</span>" if after < before else ""


def _states(row: Row) -> str:
    runs = row.group.runs
    if len(runs) == 1:
        return runs[0].state
    done = sum(run.finished for run in runs)
    return f"{len(runs)} seeds, {done} finished"


def _figure(picture: Picture) -> str:
    notes = " ".join(picture.notes)
    caption = f"<figcaption>{escape(notes)}</figcaption>" if notes else ""
    if picture.svg is None:
        return f"<figure><b>{escape(picture.title)}</b><figcaption>Missing: {escape(notes)}.</figcaption></figure>"
    return f"<figure>{picture.svg}{caption}</figure>"
