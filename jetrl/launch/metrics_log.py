"""VeRL's JSON-lines metrics file: following it while the job runs, keeping it over a resume, reading one step's figures.

VeRL's file logger writes `{"step": int, "data": {name: number}}`, one line a step, and opens the file anew ("wb") at
every start. A resumed run would therefore erase the steps before it: `keep_history` moves the old file aside first.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# VeRL takes "acc" as the core variable where the reward function returns one, else "reward". The data source may
# itself hold slashes (openai/gsm8k); best@N and maj@N are other statistics of the same answers.
VALIDATION_ACCURACY = re.compile(r"^val-core/.+/(?:acc|reward)/mean@\d+$")


@dataclass(frozen=True)
class StepFigures:
    """What one console line shows; None where the step did not log it. NaN stays NaN."""

    reward: float | None
    accuracy: float | None  # validation; the mean over data sources where there are several
    length: float | None  # response tokens, mean
    k3_kl: float | None  # mean over tokens of exp(-d) - 1 + d with d = log p_rollout - log p_actor
    p99: float | None  # 99th percentile over tokens of |d|
    tokens_per_second: float | None  # prompt and response tokens of the step over its seconds, all devices together
    seconds: float | None  # rollout, update, weight sync and checkpoint; validation is not in it


def figures(metrics: dict[str, float]) -> StepFigures:
    """Picks a step's figures from VeRL's and jetrl's metric names."""
    accuracies = [float(v) for name, v in metrics.items() if VALIDATION_ACCURACY.match(name)]
    seconds = _first(metrics, "perf/time_per_step", "timing_s/step")
    tokens = _first(metrics, "perf/total_num_tokens")
    # VeRL's perf/throughput is per device, and a CPU job has no devices to multiply by.
    rate = tokens / seconds if tokens is not None and seconds else _first(metrics, "perf/throughput")
    return StepFigures(
        reward=_first(metrics, "critic/rewards/mean", "critic/score/mean"),
        accuracy=sum(accuracies) / len(accuracies) if accuracies else None,
        length=_first(metrics, "response_length/mean"),
        # The last of each: an exact flow's own comparison, where old log-probs are not recomputed.
        k3_kl=_first(metrics, "mismatch/k3_kl", "rollout_corr/k3_kl", "actor/log_prob_k3_kl"),
        p99=_first(metrics, "mismatch/abs_logprob_diff_p99", "actor/log_prob_max_difference"),
        tokens_per_second=rate,
        seconds=seconds,
    )


def _first(metrics: dict[str, float], *names: str) -> float | None:
    # orjson, VeRL's writer, turns NaN and Inf into null: a name without a value is a bad number, not a missing metric.
    for name in names:
        if name in metrics:
            return float("nan") if metrics[name] is None else float(metrics[name])
    return None


class MetricsTail:
    """The new whole lines of a metrics file that another process writes, in order.

    `poll()` yields (step, metrics) for every line completed since the last call. A file that is not there yet has no
    lines; a partial last line waits for its end; a file that was replaced or became shorter is read from its start.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self._offset = 0
        self._inode: int | None = None

    def poll(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Raises ValueError for a complete line that is not VeRL's format, with the line's beginning."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(0, 2)
            size, inode = file.tell(), os.fstat(file.fileno()).st_ino
            if inode != self._inode or size < self._offset:
                self._inode, self._offset = inode, 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                if line.strip():
                    yield _parse(line, self.path)


def _parse(line: bytes, path: Path) -> tuple[int, dict[str, float]]:
    try:
        record = json.loads(line)
        step, data = int(record["step"]), dict(record["data"])
    except (ValueError, KeyError, TypeError, OverflowError) as error:  # OverflowError: an infinite step
        raise ValueError(f"{path} has a line that is not a metrics record: {line[:80]!r}") from error
    # VeRL also writes what a user's reward function or trainer returned; a word there is no figure, and no damage.
    return step, {name: value for name, value in data.items() if value is None or isinstance(value, int | float)}


def keep_history(path: Path) -> Path | None:
    """Moves a metrics file of an earlier start to `<stem>.<n><suffix>` before VeRL opens it anew.

    Returns where it went, or None if there was nothing to keep.
    """
    path = Path(path)
    if not path.exists() or path.stat().st_size == 0:
        return None
    number = max(_earlier(path), default=0) + 1
    kept = path.with_name(f"{path.stem}.{number}{path.suffix}")
    path.rename(kept)
    return kept


def _earlier(path: Path) -> dict[int, Path]:
    """The kept files of earlier starts by their number, oldest first."""
    pattern = re.compile(re.escape(path.stem) + r"\.(\d+)" + re.escape(path.suffix))
    found = ((pattern.fullmatch(p.name), p) for p in path.parent.iterdir())
    return dict(sorted((int(match.group(1)), p) for match, p in found if match))


def read_run(path: Path) -> dict[int, dict[str, float]]:
    """All steps of a run over all its starts, by step. A step that was done again counts as it was the last time."""
    path, steps = Path(path), {}
    for part in [*_earlier(path).values(), path]:
        for step, metrics in MetricsTail(part).poll():
            steps[step] = {**steps.get(step, {}), **metrics}
    return dict(sorted(steps.items()))


@dataclass(frozen=True)
class RunFigures:
    """A run in one row; None where nothing was logged."""

    steps: int  # training steps, the validation before the first one not counted
    accuracy_before: float | None
    accuracy_after: float | None
    k3_kl: float | None  # mean over steps
    p99: float | None  # mean over steps of the step's 99th percentile
    seconds: float  # sum over training steps


def summarize(steps: dict[int, dict[str, float]]) -> RunFigures:
    """One row from `read_run`'s steps. A NaN in any step makes that mean NaN, so it is not averaged away."""
    rows = [figures(steps[step]) for step in sorted(steps)]
    validated = [row for row in rows if row.accuracy is not None]
    # With trainer.val_before_train=false the only validation may be the one after the last step.
    only_after = len(validated) == 1 and validated[0].seconds is not None
    return RunFigures(
        steps=sum(row.seconds is not None for row in rows),
        accuracy_before=validated[0].accuracy if validated and not only_after else None,
        accuracy_after=validated[-1].accuracy if len(validated) > 1 or only_after else None,
        k3_kl=_mean(row.k3_kl for row in rows),
        p99=_mean(row.p99 for row in rows),
        seconds=sum(row.seconds for row in rows if row.seconds is not None),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    present = [v for v in values if v is not None]
    return sum(present) / len(present) if present else None
