"""Which runs a command line means, and what each left behind: configuration, metrics, how it ended.

A run is a folder of jetrl.train, or a JSON-lines file of VeRL's file logger, which has no configuration beside it.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jetrl.errors import UserError
from jetrl.launch.metrics_log import figures, read_run
from jetrl.launch.wiring import METRICS
from jetrl.launch.worker_entry import FAILURE

CONFIG = "config.yaml"
MARKED = "marked.json"
MESSAGE = 160  # characters of a failure's message; the run's log has all of it
# metrics.3.jsonl is the third start of the run in metrics.jsonl, not a run of its own.
_EARLIER_START = re.compile(r".+\.\d+\.jsonl$")


@dataclass(frozen=True)
class Run:
    """name: unique among the report's runs. steps: step -> VeRL's metrics. cfg: plain dicts; None for a plain VeRL job.

    failure: `<exception>: <message>` of a job that ended with one. unreadable: why a run in a folder of runs is only
    listed; such a run has neither steps nor configuration. marked: step -> why its rollout is no measure of the flow's
    mismatch, from marked.json: such a step is drawn and named, and left out of mismatch comparisons.
    """

    name: str
    path: Path
    steps: dict[int, dict[str, float | None]]
    cfg: dict | None = None
    failure: str | None = None
    unreadable: str | None = None
    marked: dict[int, str] = field(default_factory=dict)

    @cached_property
    def flat(self) -> dict[str, object]:
        """Dotted key -> value of the configuration; lists as they are. {} without a configuration."""
        result: dict[str, object] = {}

        def walk(prefix: str, node: object) -> None:
            if isinstance(node, dict) and node:
                for key, value in node.items():
                    walk(f"{prefix}.{key}" if prefix else str(key), value)
            elif prefix:
                result[prefix] = node

        walk("", self.cfg or {})
        return result

    @property
    def last_step(self) -> int:
        """The last training step with metrics; 0 before the first."""
        return max((step for step, metrics in self.steps.items() if figures(metrics).seconds is not None), default=0)

    @property
    def total_steps(self) -> int | None:
        """How many steps the job was to do; None where its configuration does not say."""
        explicit = "trainer.total_training_steps"
        if self.flat.get(explicit) is not None:
            return self._count(explicit)
        names = ("trainer.total_epochs", "task.train_size", "data.train_batch_size")
        epochs, rows, batch = map(self._count, names)
        return epochs * (rows // batch) if epochs and rows and batch else None

    def _count(self, key: str) -> int | None:
        value = self.flat.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def finished(self) -> bool:
        return self.total_steps is not None and self.last_step >= self.total_steps

    @property
    def state(self) -> str:
        """One phrase: finished, or where it stopped and why."""
        of = f" of {self.total_steps}" if self.total_steps is not None else ""
        if self.unreadable is not None:
            return f"left out: {self.unreadable}"
        if self.finished:
            return f"finished, {self.last_step} steps"
        where = f"at step {self.last_step}{of}" if self.last_step else f"before the first step{of and f' (0{of})'}"
        if self.failure is not None:
            return f"ended {where}: {self.failure.partition(':')[0]}"
        if self.total_steps is None:
            return f"{self.last_step} steps; how many were planned is not recorded"
        return f"partial, {where}"


def load_runs(paths: Sequence[str]) -> tuple[list[Run], Path]:
    """The runs that `paths` mean and the folder where the report goes unless told otherwise.

    A path is a run's folder, a folder of runs (a sweep), or a metrics file. Raises UserError for anything else, and for a
    run that cannot be read, unless it is one of several in a folder and another of them can: then it is `unreadable`.
    """
    found: dict[Path, bool] = {}  # place -> whether it was only come upon in a folder
    home: Path | None = None
    for text in paths:
        path = Path(text).expanduser()
        places = _places(path, text)
        for place in (place.resolve() for place in places):
            found[place] = found.get(place, True) and len(places) > 1
        if home is None:
            home = path if path.is_dir() else path.parent
    names = _names(list(found))
    runs, first = [], None
    for place, one_of_many in found.items():
        try:
            runs.append(_load(place, names[place]))
        except UserError as e:
            if not one_of_many:
                raise
            first = first or e
            runs.append(Run(names[place], place, {}, unreadable=_why(e, place)))
    if first is not None and all(run.unreadable for run in runs):
        raise first
    return runs, home


def _places(path: Path, text: str) -> list[Path]:
    if path.is_file():
        return [path.parent if path.name == METRICS and (path.parent / CONFIG).is_file() else path]
    if not path.is_dir():
        raise UserError(f"{text} does not exist; give a run's folder, a folder of runs, or a metrics .jsonl file")
    if _is_run(path):
        return [path]
    inside = sorted(entry for entry in path.iterdir() if entry.is_dir() and _is_run(entry))
    inside += sorted(f for f in path.glob("*.jsonl") if not _EARLIER_START.match(f.name))
    if not inside:
        raise UserError(
            f"{text} is neither a run nor a folder of runs: a run has {CONFIG} or {METRICS} in it; give a folder that "
            "jetrl.train wrote, or a metrics .jsonl file of VeRL's file logger"
        )
    return inside


def _is_run(folder: Path) -> bool:
    # Any folder may hold a config.yaml; jetrl's is read and checked later, and says what is wrong with another's.
    return (folder / METRICS).is_file() or (folder / CONFIG).is_file()


def _names(places: list[Path]) -> dict[Path, str]:
    """The shortest tail of each path that no other run shares."""
    bare = {place: place.with_suffix("") if place.suffix == ".jsonl" else place for place in places}
    names: dict[Path, str] = {}
    for place in places:
        parts = bare[place].parts
        for count in range(1, len(parts) + 1):
            tail = parts[-count:]
            if sum(other.parts[-count:] == tail for other in bare.values()) == 1:
                break
        names[place] = "/".join(tail).lstrip("/")
    return names


def _load(place: Path, name: str) -> Run:
    folder = place if place.is_dir() else None
    metrics = folder / METRICS if folder else place
    try:
        steps = read_run(metrics)
    except ValueError as e:
        raise UserError(f"{e}; give the file that VeRL's file logger wrote (trainer.logger=[file])") from e
    except OSError as e:
        raise UserError(f"{metrics} cannot be read ({e.strerror}); give a file that this user may read") from e
    cfg = _config(folder / CONFIG) if folder and (folder / CONFIG).is_file() else None
    if not steps and cfg is None:
        raise UserError(f"{metrics} has no metrics in it; give a run that logged at least one step")
    if folder is None:
        return Run(name, place, steps, cfg)
    return Run(name, place, steps, cfg, _failure(folder / FAILURE), marked=_marked(folder / MARKED))


def _why(error: UserError, place: Path) -> str:
    """What is wrong with a run, without its folder and without what to give instead."""
    return str(error).partition("; give ")[0].replace(f"{place}/", "").replace(str(place), place.name)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """libyaml's speed (a job's file has a thousand lines), and 1e-6 is a number, as it is for OmegaConf."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(?:\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _config(file: Path) -> dict:
    try:
        text = file.read_text(encoding="utf-8")
        cfg = yaml.load(text, _Loader)  # noqa: S506 - a safe loader
        if "${" in text:
            cfg = OmegaConf.to_container(OmegaConf.create(cfg), resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as e:
        raise UserError(f"{file} is not a readable configuration ({_first_line(e)}); give a run of jetrl.train") from e
    if not isinstance(cfg, dict) or "actor_rollout_ref" not in cfg:
        raise UserError(f"{file} is not a job's configuration (no actor_rollout_ref in it); give a run of jetrl.train")
    parts = cfg["actor_rollout_ref"] if isinstance(cfg["actor_rollout_ref"], dict) else {}
    missing = [part for part in ("actor", "rollout", "model") if not isinstance(parts.get(part), dict)]
    if missing:
        raise UserError(
            f"{file} is not a job's configuration (actor_rollout_ref.{missing[0]} is no group of keys); give a run of jetrl.train"
        )
    return cfg


def _marked(file: Path) -> dict[int, str]:
    """A mark that cannot be read is an error: without it the figures would say something else."""
    if not file.is_file():
        return {}
    try:
        return {int(step): str(why) for step, why in json.loads(file.read_text()).items()}
    except (ValueError, AttributeError) as e:
        raise UserError(f'{file} does not map steps to reasons; give it the form {{"17": "why"}}') from e


def _failure(file: Path) -> str | None:
    """How jetrl.train says the job ended, in one line."""
    if not file.is_file():
        return None
    try:
        record = json.loads(file.read_text())
        kind, message = str(record["type"]), str(record.get("message") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        # A job that died while writing this file did fail; what it wanted to say is lost.
        return f"{file.name} is torn, the log has more"
    text = " ".join(message.split())
    text = text if len(text) <= MESSAGE else f"{text[:MESSAGE].rpartition(' ')[0]} …"
    return f"{kind}: {text}" if text else kind


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
