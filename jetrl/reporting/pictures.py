"""Which pictures a report has, and for each what it could not show."""

from dataclasses import dataclass

from jetrl.reporting.compare import Row
from jetrl.reporting.groups import Group
from jetrl.reporting.measures import COST, COURSE, LEARNING, MISMATCH, PHASES, REST, Quantity, course, values
from jetrl.reporting.style import STYLES
from jetrl.reporting.svg import Curve, line_chart, stacked_bars

SECTIONS = {"Learning": LEARNING, "Mismatch between rollout and trainer": MISMATCH, "Course of training": COURSE}
TIME_SECTION = "Time and memory"
PHASE_TITLE = "Time per phase, mean over steps"


@dataclass(frozen=True)
class Picture:
    """svg None: there was nothing to draw, and `notes` says what is missing."""

    key: str
    title: str
    svg: str | None
    notes: tuple[str, ...] = ()


def sections(table: list[Row]) -> dict[str, list[Picture]]:
    """Heading -> its pictures, in reading order."""
    groups = [row.group for row in table]
    result = {name: [p for q in quantities if (p := draw(q, groups))] for name, quantities in SECTIONS.items()}
    return {**result, TIME_SECTION: [draw_phases(table), *(draw(q, groups) for q in COST)]}


def draw(quantity: Quantity, groups: list[Group]) -> Picture | None:
    """None for an optional quantity that no run logged."""
    curves, absent, broken, faint, window = [], [], [], [], 1
    for group in groups:
        line = course(group, quantity)
        if line.not_numbers:
            broken.append(f"{group.label} ({line.not_numbers} steps)")
        if not line.steps:
            absent.append(group.label)
            continue
        window = max(window, line.window)
        seeds = f" ({_count(group, quantity)} seeds)" if len(group.runs) > 1 else ""
        band = (line.low, line.high) if line.has_band else (None, None)
        if line.whole is not None and line.steps[-1] > line.whole:
            faint.append(f"{group.label} after step {line.whole}")
        curves.append(Curve(group.label + seeds, group.style % STYLES, line.steps, line.mean, *band, line.whole))
    names = " or ".join(quantity.names)
    if not curves and quantity.optional and not broken:
        return None
    if not curves:
        why = "NaN or Inf in every step" if broken else f"logged by none of these runs ({names})"
        return Picture(quantity.key, quantity.title, None, (why,))
    notes = []
    if window > 1:
        notes.append(f"Line: mean over {window} steps and all seeds; band: lowest to highest of them.")
    elif any(c.low for c in curves):
        notes.append("Line: mean over seeds; band: lowest to highest seed.")
    if faint:
        notes.append(f"Thin and pale: fewer seeds, others had ended ({', '.join(faint)}).")
    if quantity in MISMATCH and any(run.marked for group in groups for run in group.runs):
        notes.append("Marked steps are drawn here, but in no average above.")
    if absent:
        notes.append(f"Missing: {', '.join(absent)} did not log it ({names}).")
    if broken:
        notes.append(f"NaN or Inf, not drawn: {', '.join(broken)}.")
    svg = line_chart(quantity.title, "training step", quantity.unit, curves, quantity.log)
    return Picture(quantity.key, quantity.title, svg, tuple(notes))


def _count(group: Group, quantity: Quantity) -> str:
    """How many of the group's runs a curve stands for: one that broke off at its start logged nothing."""
    logged, runs = sum(bool(values(run, quantity)) for run in group.runs), len(group.runs)
    return f"{runs}" if logged == runs else f"{logged} of {runs}"


def draw_phases(table: list[Row]) -> Picture:
    bars = [(row.group.label, row.phases) for row in table if row.phases]
    if not bars:
        return Picture("phases", PHASE_TITLE, None, ("logged by none of these runs (timing_s/*)",))
    order = [phase for phase in [*PHASES.values(), REST] if any(phase in parts for _, parts in bars)]
    notes = ["Validation and checkpoints, which do not come every step, are spread over all steps."]
    absent = [row.group.label for row in table if not row.phases]
    if absent:
        notes.append(f"Missing: {', '.join(absent)} logged no timing_s/step.")
    return Picture("phases", PHASE_TITLE, stacked_bars(PHASE_TITLE, "seconds per step", bars, order), tuple(notes))
