"""`-m`: every combination of the comma lists, checked before the first starts, then one child process after another.

jetrl's own and not Hydra's launcher: each job needs its own Ray, and a failing one must not stop the others.
"""

import itertools
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig

from jetrl.errors import JobError, UserError
from jetrl.launch import metrics_log, preflight
from jetrl.launch.args import GROUPS, CommandLine
from jetrl.launch.compose import DEFAULT_ROOT, compose_job
from jetrl.launch.errors_map import check_grammar
from jetrl.launch.job import INTERRUPTED, run_job
from jetrl.launch.wiring import METRICS


@dataclass(frozen=True)
class SweepJob:
    """One combination: its own command line, and what distinguishes it from the others."""

    line: CommandLine
    label: str
    cfg: DictConfig

    @property
    def folder(self) -> Path:
        return Path(self.cfg.run.dir)


def expand(line: CommandLine) -> list[SweepJob]:
    """All jobs of a sweep, composed. Raises UserError when one is wrong, or when two would share a folder."""
    words = [f"{group}={value}" for group, value in line.choices.items()] + list(line.overrides)
    given = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    root = _one_value("run.dir", given) or DEFAULT_ROOT
    prefix = _one_value("run.name", given)
    values = [_values(word) for word in words if word.partition("=")[0] not in ("run.dir", "run.name")]
    jobs = []
    for combination in itertools.product(*values):
        varied = [word for word, many in zip(combination, values, strict=True) if len(many) > 1]
        plain = [word for word in varied if word.partition("=")[0] not in GROUPS]
        job = _one(line, combination)
        if prefix:
            name = "-".join([prefix, *(_as_name(word) for word in varied)]).replace("'", "\\'")
            job = replace(job, overrides=(*job.overrides, f"run.name='{name}'"))
        cfg = compose_job(job, name_suffix="".join(f"-{_as_name(word)}" for word in plain), root=root)
        jobs.append(SweepJob(job, " ".join(varied) or str(cfg.run.name), cfg))
    _refuse_shared_folders(jobs)
    return jobs


def run_sweep(line: CommandLine, stream: TextIO | None = None) -> int:
    """0 when every job succeeded, 1 when one failed, 130 after Ctrl-C. Raises UserError before anything has started."""
    stream = sys.stdout if stream is None else stream
    jobs = expand(line)
    for job in jobs:
        preflight.check(job.cfg)
    results: dict[str, str] = {}
    for number, job in enumerate(jobs, 1):
        print(f"[{number}/{len(jobs)}] {job.label}", file=stream, flush=True)
        try:
            code = run_job(job.cfg, job.folder, stream)
        except (JobError, UserError, OSError) as e:
            results[job.label] = f"failed: {e}"
            print(f"jetrl: {job.label} failed: {e}", file=sys.stderr, flush=True)
            continue
        if code == INTERRUPTED:
            return INTERRUPTED
        results[job.label] = "ok"
    _print_table(jobs, results, stream)
    return 0 if all(result == "ok" for result in results.values()) else 1


def _one(line: CommandLine, combination: tuple[str, ...]) -> CommandLine:
    choices, overrides = {}, []
    for word in combination:
        key, _, value = word.partition("=")
        if key in GROUPS:
            choices[key] = value
        else:
            overrides.append(word)
    return replace(line, choices=choices, overrides=tuple(overrides), multirun=False)


def _values(word: str) -> list[str]:
    """`a=1,2` -> [`a=1`, `a=2`], by Hydra's own grammar (choice(), range(), glob-free)."""
    try:
        override = OverridesParser.create().parse_override(word)
        if not override.is_sweep_override():
            return [word]
        key = override.get_key_element()
        return [f"{key}={value}" for value in override.sweep_string_iterator()]
    except HydraException as e:
        raise UserError(f"{word} is not a sweep that Hydra can read: {' '.join(str(e).split())}") from e


def _one_value(key: str, given: dict[str, str]) -> str | None:
    """The text of run.dir or run.name without Hydra's quotes; None where it is not given or null."""
    if key not in given:
        return None
    check_grammar(f"{key}={given[key]}")
    override = OverridesParser.create().parse_override(f"{key}={given[key]}")
    if override.is_sweep_override():
        raise UserError(f"{key}={given[key]} gives several values; a sweep has one {key}, and jetrl names its jobs")
    value = override.value()
    return None if value is None else str(value)


def _as_name(word: str) -> str:
    """`actor_rollout_ref.actor.optim.lr=1e-6` -> `lr=1e-6`, with what a folder's name cannot hold replaced."""
    key, _, value = word.partition("=")
    return re.sub(
        r"[^\w.,=+@-]+", "_", f"{key.lstrip('+~').rpartition('.')[2]}={value}" if key not in GROUPS else value
    )


def _refuse_shared_folders(jobs: list[SweepJob]) -> None:
    seen: dict[Path, str] = {}
    for job in jobs:
        if job.folder in seen:
            raise UserError(
                f"the jobs {seen[job.folder]!r} and {job.label!r} of the sweep would share the folder {job.folder}; "
                "give each value once"
            )
        seen[job.folder] = job.label


def _print_table(jobs: list[SweepJob], results: dict[str, str], stream: TextIO) -> None:
    width = max(len(job.label) for job in jobs)
    print(
        f"\n{'job':<{width}}  {'acc before':>10} {'acc after':>10} {'k3 KL':>9} {'p99':>9} {'s':>7}  result",
        file=stream,
    )
    for job in jobs:
        run = metrics_log.summarize(metrics_log.read_run(job.folder / METRICS)) if job.folder.is_dir() else None
        cells = [
            _cell(run and run.accuracy_before, "10.3f"),
            _cell(run and run.accuracy_after, "10.3f"),
            _cell(run and run.k3_kl, "9.2e"),
            _cell(run and run.p99, "9.2e"),
            _cell(run and run.seconds, "7.0f"),
        ]
        print(f"{job.label:<{width}}  {' '.join(cells)}  {results[job.label]}", file=stream)


def _cell(value: float | None, spec: str) -> str:
    width = int(spec.partition(".")[0])
    return f"{'-':>{width}}" if value is None else f"{value:{spec}}"
