"""From groups to figures and sentences: one row per flow, and what the comparison does and does not establish."""

import math
from dataclasses import dataclass
from statistics import fmean, median, stdev

from jetrl.reporting.graph_verdict import UNKNOWN, Verdict
from jetrl.reporting.groups import BASELINE, Group, baseline_of, different_keys, is_seed
from jetrl.reporting.measures import (
    ACCURACY,
    K3,
    MISMATCH,
    REWARD,
    Spread,
    average,
    compared,
    first_and_last,
    phase_seconds,
    seconds_per_step,
    spread,
    tokens_per_second,
    values,
)
from jetrl.reporting.runs import Run
from jetrl.reporting.svg import number

# An accuracy counts as BF16's where it is within the seeds' spread of it, or within 1 % absolute.
ABSOLUTE_BAR = 0.01
FP8_ROLLOUTS = ("fp8_rollout", "fp8_vllm")
SHARED_GPU = "side_by_side"


@dataclass(frozen=True)
class Difference:
    """A group's accuracy minus its baseline's, at the last step that all runs of both validated."""

    baseline: Group
    step: int
    value: float
    spread: float | None  # sqrt(sd1^2 + sd2^2); None where a side has one run
    sampling: float | None  # standard error that the number of validation questions alone gives


@dataclass(frozen=True)
class Paired:
    """A group's training reward minus its baseline's of the same seed: runs of one seed see the same prompts in the same
    order, so most of what differs from step to step falls out. Over all steps 1..step that every paired run reached.
    """

    baseline: Group
    step: int
    value: float
    error: float | None  # standard error of the mean over seeds; None for one seed
    seeds: int


@dataclass(frozen=True)
class Row:
    """One group in figures. Accuracies in [0, 1]; mismatch in nats; times in seconds."""

    group: Group
    before: Spread
    after: Spread
    best: float | None
    difference: Difference | None
    paired: Paired | None
    mismatch: dict[str, Spread]  # by quantity key, each run's mean over steps
    seconds: Spread
    tokens_per_second: Spread
    verdict: Verdict
    phases: dict[str, float]


def rows(groups: list[Group], verdicts: dict[str, Verdict]) -> list[Row]:
    return [_row(group, groups, verdicts) for group in groups]


def _row(group: Group, groups: list[Group], verdicts: dict[str, Verdict]) -> Row:
    ends = [first_and_last(run) for run in group.runs]
    accuracies = [v for run in group.runs for v in values(run, ACCURACY).values() if math.isfinite(v)]
    baseline = baseline_of(group, groups)
    return Row(
        group=group,
        before=spread([before for before, _ in ends]),
        after=spread([after for _, after in ends]),
        best=max(accuracies, default=None),
        difference=None if baseline is None or baseline is group else _difference(group, baseline),
        paired=None if baseline is None or baseline is group else _paired(group, baseline),
        mismatch={q.key: spread([average(run, q) for run in group.runs]) for q in MISMATCH},
        seconds=spread([seconds_per_step(run) for run in group.runs]),
        tokens_per_second=spread([tokens_per_second(run) for run in group.runs]),
        verdict=verdicts[group.runs[0].name],
        phases=phase_seconds(group),
    )


def _difference(group: Group, baseline: Group) -> Difference | None:
    validated = [set(values(run, ACCURACY)) for g in (group, baseline) for run in g.runs]
    # Step 0 is before training: nothing to compare yet.
    common = set.intersection(*validated) - {0}
    if not common:
        return None
    step = max(common)
    mine, theirs = (spread([values(run, ACCURACY)[step] for run in g.runs]) for g in (group, baseline))
    both = mine.sd is not None and theirs.sd is not None
    return Difference(
        baseline,
        step,
        mine.mean - theirs.mean,
        math.hypot(mine.sd, theirs.sd) if both else None,
        _sampling_error(mine, theirs, group.runs[0].flat),
    )


def _paired(group: Group, baseline: Group) -> Paired | None:
    # Not by Group.seeds: those are words for people, which leave out what does not differ within the group.
    keys = [k for k in group.runs[0].flat if is_seed(k) and k in baseline.runs[0].flat]
    mine, theirs = ({tuple(run.flat.get(k) for k in keys): run for run in g.runs} for g in (group, baseline))
    pairs = [(values(mine[s], REWARD), values(theirs[s], REWARD)) for s in mine if s in theirs]
    if not pairs:
        return None
    common = set.intersection(*({s for s in a if s in b and math.isfinite(a[s] - b[s])} for a, b in pairs))
    if not common:
        return None
    differences = [fmean(a[s] - b[s] for s in common) for a, b in pairs]
    error = stdev(differences) / math.sqrt(len(pairs)) if len(pairs) > 1 else None
    return Paired(baseline, max(common), fmean(differences), error, len(pairs))


def _sampling_error(mine: Spread, theirs: Spread, config: dict) -> float | None:
    """Of a difference of two shares measured on n questions, as if the two sides' errors were independent (a shared
    question set makes it smaller): sqrt(p1 (1 - p1) / n1 + p2 (1 - p2) / n2), n = questions times runs."""
    questions = config.get("task.val_size")
    shares = [(side.mean, side.count) for side in (mine, theirs)]
    if not questions or not all(0 <= p <= 1 for p, _ in shares):
        return None
    return math.sqrt(sum(p * (1 - p) / (questions * count) for p, count in shares))


def findings(table: list[Row]) -> list[str]:
    """The verdict, unified flows first: accuracy against BF16, then mismatch against the FP8 rollouts."""
    unified_first = sorted(table, key=lambda row: not _is_unified(row))
    return [s for row in unified_first if (s := _accuracy_sentence(row))] + _mismatch_sentences(table)


def _is_unified(row: Row) -> bool:
    return (row.group.flow or "").startswith("unified")


def _accuracy_sentence(row: Row) -> str | None:
    d = row.difference
    if d is None or math.isnan(d.value):
        return _paired_sentence(row) if row.paired else _own_sentence(row)
    size = abs(d.value)
    inside = size <= ABSOLUTE_BAR or (d.spread is not None and size <= d.spread)
    head = f"{row.group.label}: {_signed(d.value)} against {d.baseline.label} in validation accuracy at step {d.step}, "
    # The FP8 rollout is there to be seen failing; where it does not, the comparison shows less than it seems to.
    degraded = "; an FP8 rollout alone does not degrade here" if row.group.flow in FP8_ROLLOUTS else ""
    if inside and d.spread is not None and size <= d.spread:
        return f"{head}within the seeds' spread (±{d.spread:.3f}){degraded}."
    if inside:
        return f"{head}within {ABSOLUTE_BAR} absolute{degraded}."
    direction = "above" if d.value > 0 else "below"
    if d.spread is None:
        hint = f" (the questions alone give a standard error of about {d.sampling:.3f})" if d.sampling else ""
        return f"{head}{direction} it; with one seed on a side the spread is not known{hint}."
    return f"{head}{direction} it by more than the seeds' spread (±{d.spread:.3f}) and more than {ABSOLUTE_BAR}."


def _paired_sentence(row: Row) -> str:
    """Where the runs broke off before a validation that all share: by what they were rewarded for in training."""
    p = row.paired
    by = f"{row.group.label}: {_signed(p.value)} against {p.baseline.label} in training reward, mean over steps 1 to {p.step}"
    if p.error is None:
        return f"{by} of one seed; the spread is not known."
    inside = abs(p.value) <= ABSOLUTE_BAR
    verdict = f"within {ABSOLUTE_BAR} absolute" if inside else f"{'above' if p.value > 0 else 'below'} it"
    degraded = "; an FP8 rollout alone does not degrade here" if inside and row.group.flow in FP8_ROLLOUTS else ""
    return f"{by} and {p.seeds} seeds, {verdict} (standard error over seeds {p.error:.3f}){degraded}."


def _own_sentence(row: Row) -> str | None:
    """Without a BF16 run to hold it against: what training did to the accuracy of the runs that got to a second one."""
    ends = [first_and_last(run) for run in row.group.runs]
    ends = [(before, after) for before, after in ends if after is not None]
    if not ends or row.group.flow == BASELINE:
        return None
    before, after = (fmean(side) for side in zip(*ends, strict=True))
    last = max(max(values(run, ACCURACY), default=0) for run in row.group.runs)
    return f"{row.group.label}: validation accuracy {before:.3f} before, {after:.3f} at step {last} ({after - before:+.3f})."


def _mismatch_sentences(table: list[Row]) -> list[str]:
    """Every unified flow against every FP8 rollout on a BF16 trainer, step by step."""
    result = []
    for row in table:
        for other in table:
            if not _is_unified(row) or other.group.flow not in FP8_ROLLOUTS:
                continue
            mine, theirs = _by_step(row.group), _by_step(other.group)
            common = sorted(set(mine) & set(theirs))
            if not common:
                continue
            below = sum(mine[s] < theirs[s] for s in common)
            where = "at every step" if below == len(common) else f"at {below} of {len(common)} steps only"
            result.append(
                f"{row.group.label}: mismatch (k3) below {other.group.label}'s {where}{_ratio(mine, theirs, common)}."
            )
    return result


def _ratio(mine: dict[int, float], theirs: dict[int, float], common: list[int]) -> str:
    middle_mine, middle_theirs = (median(side[s] for s in common) for side in (mine, theirs))
    text = f"; medians {number(middle_mine)} against {number(middle_theirs)} nats"
    if middle_mine <= 0 or middle_theirs <= 0:
        return text
    ratio = middle_theirs / middle_mine
    return f"{text} ({_times(ratio)} lower)" if ratio >= 1 else f"{text} ({_times(1 / ratio)} higher)"


def _times(ratio: float) -> str:
    """ "6.2x", "2500x"; from a million on, where only the order of magnitude speaks, "1e11 times"."""
    if ratio < 1e6:
        return f"{number(float(f'{ratio:.2g}'))}x"
    return f"1e{math.floor(math.log10(ratio))} times"


def shared_a_gpu(run: Run) -> bool:
    return run.flat.get("choices.hardware") == SHARED_GPU


def _by_step(group: Group) -> dict[int, float]:
    steps: dict[int, list[float]] = {}
    for run in group.runs:
        for step, value in compared(run, K3).items():
            if math.isfinite(value):
                steps.setdefault(step, []).append(value)
    return {step: fmean(row) for step, row in steps.items()}


def limits(table: list[Row]) -> list[str]:
    """What these runs do not establish, and why."""
    result = []
    runs = [run for row in table for run in row.group.runs]
    short = [run for run in runs if not run.finished and run.total_steps is not None]
    if short:
        result.append(
            f"{len(short)} of {len(runs)} run{'s' * (len(runs) > 1)} did not finish: "
            + "; ".join(f"{run.name} {run.state}" for run in short[:4])
            + (f"; and {len(short) - 4} more" if len(short) > 4 else "")
            + "."
        )
    single = [row.group.label for row in table if len(row.group.runs) == 1 and row.group.flow]
    if single:
        result.append(f"One seed only, so no spread: {', '.join(single)}.")
    if len(table) > 1 and not any(row.group.flow == BASELINE for row in table):
        result.append("No bf16 run is among them, so nothing is said about the difference from BF16.")
    by_reward = [r.group.label for r in table if r.difference is None and r.paired]
    if by_reward:
        result.append(
            f"Not all runs came to a validation step that bf16 shares, so compared by training reward: {', '.join(by_reward)}."
        )
    result += [
        f"Marked, so in no mismatch average: {run.name} step {step} ({why})."
        for run in runs
        for step, why in sorted(run.marked.items())
    ]
    if any(shared_a_gpu(run) for run in runs):
        result.append("Runs were set up to share a GPU (hardware=side_by_side): their seconds do not compare flows.")
    alone = [r.group.label for r in table if not (r.difference or r.paired) and r.group.flow not in (None, BASELINE)]
    if alone and any(row.group.flow == BASELINE for row in table):
        result.append(
            f"Not compared with bf16, which was not run on the same model, task and lengths to a validation step that "
            f"they share: {', '.join(alone)}."
        )
    for row in table:
        d = row.difference
        extra = different_keys([row.group.runs[0].flat, d.baseline.runs[0].flat]) if d else []
        if extra:
            result.append(
                f"{row.group.label} and {d.baseline.label} differ in more than the flow "
                f"({', '.join(extra[:3])}{', and more' if len(extra) > 3 else ''})."
            )
    unknown = [row.group.label for row in table if row.verdict.state == UNKNOWN]
    if unknown:
        result.append(f"The precision graph was not checked for: {', '.join(unknown)}.")
    return result


def _signed(value: float) -> str:
    return f"{value:+.3f}" if round(value, 3) else "0.000"
