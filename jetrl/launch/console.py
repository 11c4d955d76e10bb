"""What a person sees of a job: what it is waiting for, one line a step under a header, and a summary at the end."""

import math
import sys
import time
from collections.abc import Callable
from typing import TextIO

from jetrl.launch.metrics_log import RunFigures, figures

WIDTH = 120
HEADER_EVERY = 20
# Seconds between two lines about the same phase where nothing can be rewritten in place (a file, CI).
HEARTBEAT = 30.0


class Console:
    """Prints a job's course to `stream`, in at most 120 columns.

    total_steps: the job's last training step, shown as "3/40"; None shows "3".
    clock: seconds, monotonic; the elapsed time of a phase is measured with it.
    """

    def __init__(
        self,
        total_steps: int | None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total_steps = total_steps
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._in_place = self._stream.isatty()
        self._delta = "Δ" if _can_write(self._stream, "Δ") else "d"
        self._lines_since_header: int | None = None
        self._phase: str | None = None
        self._phase_began = self._phase_shown = 0.0

    def start(self, title_lines: list[str]) -> None:
        """The job's beginning: what runs, from where, with which flow. A longer line is cut at 120 columns."""
        for line in title_lines:
            self._line(line)

    def phase(self, text: str) -> None:
        """What the job is at now. Call it again and again with the same text: the elapsed seconds are kept up to date,
        in place on a terminal, as a line every 30 s elsewhere."""
        now = self._clock()
        if text != self._phase:
            self._phase, self._phase_began, self._phase_shown = text, now, now
            self._write_phase(0)
        elif self._in_place or now - self._phase_shown >= HEARTBEAT:
            self._phase_shown = now
            self._write_phase(int(now - self._phase_began))

    def step(self, metrics: dict[str, float], step: int) -> None:
        """One line of a step's metrics (VeRL's names); "-" where a metric is missing, "nan" where it is not a number."""
        if self._lines_since_header is None or self._lines_since_header >= HEADER_EVERY:
            self._line(
                _row("step", "reward", "val acc", "length", "k3 KL", f"p99 |{self._delta}logp|", "tokens/s", "s")
            )
            self._lines_since_header = 0
        self._lines_since_header += 1
        row = figures(metrics)
        self._line(
            _row(
                f"{step}/{self.total_steps}" if self.total_steps is not None else f"{step}",
                _fixed(row.reward, 3),
                _fixed(row.accuracy, 3),
                _fixed(row.length, 1),
                _scientific(row.k3_kl),
                _scientific(row.p99),
                _fixed(row.tokens_per_second, 0),
                _fixed(row.seconds, 1),
            )
        )

    def finish(self, run: RunFigures, wall_seconds: float, written: dict[str, str]) -> None:
        """The summary. written: label -> path of what the job left behind (paths are never cut)."""
        self._line("")
        accuracy = f"{_fixed(run.accuracy_before, 3)} -> {_fixed(run.accuracy_after, 3)}"
        if run.accuracy_before is not None and run.accuracy_after is not None:
            accuracy += f"  ({run.accuracy_after - run.accuracy_before:+.3f})"
        rows = {
            "validation accuracy": accuracy,
            "mismatch k3 KL": f"{_scientific(run.k3_kl)}  (mean over steps)",
            f"mismatch p99 |{self._delta}logp|": f"{_scientific(run.p99)}  (mean over steps)",
            "time": f"{_duration(wall_seconds)}, {run.steps} steps",
        }
        for label, value in [*rows.items(), *written.items()]:
            self._erase_phase()
            self._stream.write(f"{label:<24}{value}\n")
        self._stream.flush()

    def _line(self, text: str) -> None:
        self._erase_phase()
        self._stream.write(_cut(text) + "\n")
        self._stream.flush()

    def _write_phase(self, seconds: int) -> None:
        text = f"{self._phase} ..." + (f" {seconds} s" if seconds else "")
        if self._in_place:
            # One column less: a full line would make some terminals wrap, and a wrapped line cannot be rewritten.
            self._stream.write("\r\033[K" + text[: WIDTH - 1])
        else:
            self._stream.write(_cut(text) + "\n")
        self._stream.flush()

    def _erase_phase(self) -> None:
        if self._phase is not None and self._in_place:
            self._stream.write("\r\033[K")
        self._phase = None


def _row(step, reward, accuracy, length, k3, p99, rate, seconds) -> str:
    return f"{step:>11}{reward:>10}{accuracy:>10}{length:>10}{k3:>12}{p99:>14}{rate:>12}{seconds:>10}"


def _fixed(value: float | None, digits: int) -> str:
    if value is None:
        return "-"
    # Beyond a column's width a number would push the others out of line.
    return f"{value:.{digits}f}" if not math.isfinite(value) or abs(value) < 1e6 else f"{value:.1e}"


def _scientific(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _cut(text: str) -> str:
    return text if len(text) <= WIDTH else text[: WIDTH - 3] + "..."


def _can_write(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
