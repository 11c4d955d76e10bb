"""What a task is: its name, its seed, how many rows of each split, and its own options, all checked.

Values live in configs/data/*.yaml (node `task`) and nowhere else, so every key is required here.
"""

from dataclasses import dataclass, field
from importlib import resources

from omegaconf import OmegaConf

from jetrl.errors import UserError

MAX_SEED = 2**31 - 1
MAX_ROWS = 1_000_000


@dataclass(frozen=True)
class Range:
    """A whole-number option and the values it may have."""

    low: int
    high: int


@dataclass(frozen=True)
class TaskKind:
    """generated: made from a seed, so the sizes must be given; otherwise a data set, where a null size is every row.

    options: what this kind has besides the common keys. A Range is a whole number, `str` is text or null.
    ordered: pairs of options where the first may not exceed the second.
    """

    generated: bool
    options: dict[str, Range | type] = field(default_factory=dict)
    ordered: tuple[tuple[str, str], ...] = ()


KINDS = {
    "arithmetic": TaskKind(
        generated=True,
        options={
            "min_terms": Range(2, 12),
            "max_terms": Range(2, 12),
            "min_digits": Range(1, 10),
            "max_digits": Range(1, 10),
        },
        ordered=(("min_terms", "max_terms"), ("min_digits", "max_digits")),
    ),
    "chain": TaskKind(generated=True, options={"length": Range(64, 4096), "digits": Range(1, 4)}),
    "gsm_symbolic": TaskKind(generated=True),
    "gsm8k": TaskKind(generated=False, options={"path": str}),
    "math": TaskKind(generated=False, options={"path": str}),
}
COMMON_KEYS = ("name", "seed", "train_size", "val_size")


@dataclass(frozen=True)
class TaskConfig:
    """One task. Raises UserError naming the key `task.x`, its value and what is allowed.

    train_size, val_size: rows; None means every row and is allowed for data sets only.
    options: the keys that only this task has, see KINDS.
    """

    name: str
    seed: int
    train_size: int | None
    val_size: int | None
    options: dict[str, int | str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in KINDS:
            raise UserError(f"task.name={self.name} is unknown; allowed: {', '.join(KINDS)}")
        kind = KINDS[self.name]
        _check_whole("seed", self.seed, Range(0, MAX_SEED))
        for key in ("train_size", "val_size"):
            if getattr(self, key) is not None or kind.generated:
                _check_whole(key, getattr(self, key), Range(1, MAX_ROWS))
        for key in self.options:
            if key not in kind.options:
                allowed = ", ".join((*COMMON_KEYS, *kind.options))
                raise UserError(f"task.{key} is not a key of the task {self.name}; allowed: {allowed}")
        for key, allowed in kind.options.items():
            if key not in self.options:
                raise UserError(
                    f"task.{key} is missing; the task {self.name} needs it (see configs/data/{self.name}.yaml)"
                )
            value = self.options[key]
            if isinstance(allowed, Range):
                _check_whole(key, value, allowed)
            elif value is not None and not isinstance(value, str):
                raise UserError(f"task.{key}={value!r} must be a path or null")
        for low, high in kind.ordered:
            if self.options[low] > self.options[high]:
                raise UserError(
                    f"task.{low}={self.options[low]} is above task.{high}={self.options[high]}; it may be at most that"
                )

    @property
    def generated(self) -> bool:
        return KINDS[self.name].generated

    @classmethod
    def from_dict(cls, task: dict) -> "TaskConfig":
        """From the flat `task` node; whatever is not a common key is an option of the task."""
        for key in COMMON_KEYS:
            if key not in task:
                raise UserError(f"task.{key} is missing; choose a task with data=<{'|'.join(KINDS)}> or set it")
        options = {str(key): value for key, value in task.items() if key not in COMMON_KEYS}
        return cls(**{key: task[key] for key in COMMON_KEYS}, options=options)

    def to_dict(self) -> dict:
        """The flat form that `from_dict` reads."""
        return {**{key: getattr(self, key) for key in COMMON_KEYS}, **self.options}


def task_names() -> list[str]:
    """Names of the tasks, in the order of the documentation."""
    return list(KINDS)


def load_task(name: str) -> TaskConfig:
    """The task as shipped in configs/data/<name>.yaml; raises UserError for an unknown name."""
    if name not in KINDS:
        raise UserError(f"task.name={name} is unknown; allowed: {', '.join(KINDS)}")
    text = (resources.files("jetrl.configs") / "data" / f"{name}.yaml").read_text()
    return TaskConfig.from_dict(OmegaConf.to_container(OmegaConf.create(text).task, resolve=True))


def _check_whole(key: str, value: object, allowed: Range) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not allowed.low <= value <= allowed.high:
        raise UserError(f"task.{key}={value!r} must be a whole number from {allowed.low} to {allowed.high}")
