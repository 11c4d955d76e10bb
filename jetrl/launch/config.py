"""jetrl's own nodes of the configuration, checked by dataclass; the rest of the configuration is VeRL's."""

import re
from dataclasses import dataclass, fields
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from jetrl.errors import UserError

# Numbers that jetrl itself computes with; VeRL has no dataclass for these two nodes. Key -> the smallest allowed.
WHOLE_NUMBERS = {
    "trainer.n_gpus_per_node": 1,
    "trainer.nnodes": 1,
    "trainer.total_epochs": 1,
    "trainer.total_training_steps": 1,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "data.train_batch_size": 1,
    "data.train_max_samples": -1,
    "data.max_prompt_length": 1,
    "data.max_response_length": 1,
}
OPTIONAL = ("trainer.total_training_steps",)

RESUME_MODES = ("auto", "disable")


@dataclass(frozen=True)
class RunConfig:
    """name: of the run, one path component; dir: the folder that holds everything it writes (absolute once composed)."""

    name: str
    dir: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[\w.,=+@-]+", self.name) or set(self.name) == {"."}:
            raise UserError(f"run.name={self.name} must be one folder name of letters, digits and . , = + @ - _")

    @property
    def folder(self) -> Path:
        return Path(self.dir)


def run_config(cfg: DictConfig) -> RunConfig:
    """The `run` node; UserError for unknown keys and bad values."""
    return RunConfig(**_checked("run", cfg, RunConfig))


def resume_choice(cfg: DictConfig) -> str:
    """`auto`, `disable`, or the absolute path of an existing global_step_N folder."""
    value = str(cfg.resume)
    if value in RESUME_MODES:
        return value
    folder = Path(value).expanduser().absolute()
    if not re.fullmatch(r"global_step_\d+", folder.name):
        raise UserError(f"resume={value} is unknown; allowed: auto, disable, or the path of a global_step_N folder")
    if not folder.is_dir():
        raise UserError(
            f"resume={value} is not a folder; allowed: auto, disable, or the path of a global_step_N folder"
        )
    return str(folder)


def check_numbers(cfg: DictConfig) -> None:
    """UserError for a value in WHOLE_NUMBERS that is none, or is too small."""
    for key, smallest in WHOLE_NUMBERS.items():
        value = OmegaConf.select(cfg, key)
        if value is None and key in OPTIONAL:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            raise UserError(f"{key}={value} must be a whole number of at least {smallest}")


def _checked(node: str, cfg: DictConfig, cls: type) -> dict:
    data = OmegaConf.to_container(cfg[node], resolve=True)
    allowed = [f.name for f in fields(cls)]
    if not isinstance(data, dict):
        raise UserError(f"{node}={data} must have the keys {', '.join(allowed)}")
    for key in data:
        if key not in allowed:
            raise UserError(f"{node}.{key} is not a key of {node}; allowed: {', '.join(allowed)}")
    return data
