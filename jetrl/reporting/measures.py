"""The quantities a report draws, by the names that VeRL and jetrl log them under, and their course over a group's seeds."""

import math
from dataclasses import dataclass
from statistics import fmean, median, stdev

from jetrl.launch.metrics_log import figures
from jetrl.reporting.groups import Group
from jetrl.reporting.runs import Run


@dataclass(frozen=True)
class Quantity:
    """key: file name of its picture. unit: what the y axis counts. names: VeRL's metric names, the first logged counts.

    zero_is_missing: VeRL logs 0 where there is nothing to measure (GPU memory of a job without a GPU).
    optional: only some algorithms log it; where none of the runs did, its absence is not worth a remark.
    """

    key: str
    title: str
    unit: str
    names: tuple[str, ...]
    log: bool = False
    zero_is_missing: bool = False
    optional: bool = False

    def of(self, metrics: dict[str, float | None]) -> float | None:
        """The value at a step; None where it was not logged, NaN where it was not a number (logged as null)."""
        if self.key == "accuracy":
            return figures(metrics).accuracy
        for name in self.names:
            if name in metrics:
                value = math.nan if metrics[name] is None else float(metrics[name])
                return None if self.zero_is_missing and value == 0 else value
        return None


_DIFF = "mismatch/abs_logprob_diff_"
ACCURACY = Quantity("accuracy", "Validation accuracy", "share of correct answers", ("val-core/*/acc/mean@1",))
REWARD = Quantity("reward", "Training reward", "mean reward per answer", ("critic/rewards/mean", "critic/score/mean"))
K3 = Quantity(
    "k3",
    "Mismatch: k3 KL, mean",
    "nats per token",
    ("mismatch/k3_kl", "rollout_corr/k3_kl", "actor/log_prob_k3_kl"),
    True,
)
SECONDS = Quantity("seconds", "Time per step", "seconds", ("perf/time_per_step", "timing_s/step"))
LEARNING = (ACCURACY, REWARD)
MISMATCH = (
    K3,
    Quantity("p50", "Mismatch: median of |Δ log-prob|", "nats", (_DIFF + "p50",), True),
    Quantity("p99", "Mismatch: 99th percentile of |Δ log-prob|", "nats", (_DIFF + "p99",), True),
    Quantity("max", "Mismatch: largest |Δ log-prob|", "nats", (_DIFF + "max",), True),
)
COURSE = (
    Quantity("clip_fraction", "Clip fraction", "share of tokens clipped", ("actor/pg_clipfrac",)),
    Quantity("entropy", "Entropy", "nats per token", ("actor/entropy", "actor/entropy_loss")),
    Quantity("length", "Response length", "tokens, mean over answers", ("response_length/mean",)),
    Quantity("clip_low", "Lower clip bound", "ratio", ("actor/clip_low",), optional=True),
    Quantity("clip_high", "Upper clip bound", "ratio", ("actor/clip_high",), optional=True),
    Quantity(
        "effective_samples",
        "Importance sampling: effective sample size",
        "share of the samples",
        ("rollout_corr/rollout_is_eff_sample_size",),
        optional=True,
    ),
)
COST = (
    SECONDS,
    Quantity(
        "gpu_memory",
        "GPU memory, peak allocated",
        "GiB",
        ("actor/perf/max_memory_allocated_gb", "perf/max_memory_allocated_gb"),
        zero_is_missing=True,
    ),
    Quantity(
        "host_memory",
        "Host memory in use, whole machine",
        "GiB",
        ("actor/perf/cpu_memory_used_gb", "perf/cpu_memory_used_gb"),
    ),
)

# VeRL's timers that do not overlap. Only `testing` lies outside timing_s/step (verl/trainer/ppo/v1/trainer_base.py).
PHASES = {
    "gen": "rollout (gen)",
    "reward": "reward",
    "old_log_prob": "old log-prob",
    "ref": "reference",
    "values": "values",
    "adv": "advantage",
    "update_critic": "update critic",
    "update_actor": "update actor",
    "update_weights": "weight sync",
    "save_checkpoint": "save checkpoint",
    "testing": "validation (testing)",
}
OUTSIDE_STEP = ("testing",)
REST = "rest of the step"

# Beyond this the noise of single steps fills the picture.
MOST_POINTS = 120


@dataclass(frozen=True)
class Course:
    """A quantity over a group's steps: mean over the runs that logged the step, and the lowest and highest of them.

    A long run is drawn in windows: `steps` are then the windows' last steps, `window` their size in logged steps, mean
    the mean and low and high the extremes of everything in the window, so no spike is lost. NaN steps are left out of
    the lists and counted in `not_numbers` (over all runs). whole: the last step that every run which logged any did;
    behind it the mean is over fewer seeds, and a jump of the line need not be one of any seed. None without such a step.
    """

    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    not_numbers: int
    window: int = 1
    whole: int | None = None

    @property
    def has_band(self) -> bool:
        return any(low != high for low, high in zip(self.low, self.high, strict=True))


def course(group: Group, quantity: Quantity) -> Course:
    """Empty where no run of the group logged the quantity."""
    by_step: dict[int, list[float]] = {}
    bad = 0
    logged = [set(steps) for run in group.runs if (steps := values(run, quantity))]
    shared = set.intersection(*logged) if logged else set()
    for run in group.runs:
        for step, value in values(run, quantity).items():
            if math.isfinite(value):
                by_step.setdefault(step, []).append(value)
            else:
                bad += 1
    steps = sorted(by_step)
    window = math.ceil(len(steps) / MOST_POINTS) or 1
    windows = [steps[i : i + window] for i in range(0, len(steps), window)]
    rows = [[v for step in part for v in by_step[step]] for part in windows]
    ends = [part[-1] for part in windows]
    return Course(
        ends,
        [fmean(r) for r in rows],
        [min(r) for r in rows],
        [max(r) for r in rows],
        bad,
        window,
        max(shared, default=None),
    )


def values(run: Run, quantity: Quantity) -> dict[int, float]:
    """step -> value, NaN and Inf included, steps that did not log it left out."""
    found = ((step, quantity.of(metrics)) for step, metrics in run.steps.items())
    return {step: value for step, value in found if value is not None}


def compared(run: Run, quantity: Quantity) -> dict[int, float]:
    """`values`, of a mismatch without the run's marked steps."""
    found = values(run, quantity)
    return {s: v for s, v in found.items() if s not in run.marked} if quantity in MISMATCH else found


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over `count` runs; sd None below two runs; mean None without any."""

    mean: float | None
    sd: float | None
    count: int


def spread(numbers: list[float | None]) -> Spread:
    present = [n for n in numbers if n is not None]
    if not present:
        return Spread(None, None, 0)
    # statistics.stdev raises on NaN and Inf; a run that ended with one has no spread worth a number.
    finite = all(map(math.isfinite, present))
    sd = stdev(present) if len(present) > 1 and finite else None
    return Spread(fmean(present) if finite else math.nan, sd, len(present))


def first_and_last(run: Run) -> tuple[float | None, float | None]:
    """Validation accuracy before training (the first one logged) and at the last validation, if that is another."""
    accuracies = list(values(run, ACCURACY).values())
    return (accuracies[0] if accuracies else None, accuracies[-1] if len(accuracies) > 1 else None)


def average(run: Run, quantity: Quantity) -> float | None:
    numbers = list(compared(run, quantity).values())
    return fmean(numbers) if numbers else None


def seconds_per_step(run: Run) -> float | None:
    """Median over training steps: the first one carries warm-up and compilation."""
    numbers = [v for v in values(run, SECONDS).values() if math.isfinite(v)]
    return median(numbers) if numbers else None


def tokens_per_second(run: Run) -> float | None:
    """Median over training steps; prompt and response tokens, all devices together."""
    rates = (figures(metrics).tokens_per_second for metrics in run.steps.values())
    numbers = [rate for rate in rates if rate is not None and math.isfinite(rate)]
    return median(numbers) if numbers else None


def phase_seconds(group: Group) -> dict[str, float]:
    """Phase (PHASES' labels, and what of timing_s/step no phase covers) -> mean seconds over all training steps.

    A phase that runs every N steps (validation, checkpoints) is spread over all of them.
    """
    rows = [m for run in group.runs for m in run.steps.values() if m.get("timing_s/step") is not None]
    if not rows:
        return {}
    totals = {phase: sum(m.get(f"timing_s/{phase}") or 0.0 for m in rows) for phase in PHASES}
    inside = sum(seconds for phase, seconds in totals.items() if phase not in OUTSIDE_STEP)
    rest = sum(m["timing_s/step"] for m in rows) - inside
    result = {PHASES[phase]: total / len(rows) for phase, total in totals.items() if total > 0}
    # Timers that overlap would make this negative; then there is no rest to show.
    return {**result, REST: rest / len(rows)} if rest > 0 else result
