"""jetrl's own nodes of the configuration, checked by dataclass; the rest of the configuration is VeRL's."""

import difflib
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
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
}
OPTIONAL = ("trainer.total_training_steps",)

# Nodes that jetrl reads below: a value in their place would be a traceback wherever it is first looked into.
NODES = (
    "trainer",
    "trainer.v1",
    "data",
    "actor_rollout_ref",
    "actor_rollout_ref.model",
    "actor_rollout_ref.model.override_config",
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.rollout.engine_kwargs",
    "ray_kwargs",
    "ray_kwargs.ray_init",
    "ray_kwargs.ray_init.runtime_env",
)
OWN_NODES = ("run", "flow", "flow.train", "flow.rollout")
# May be left out or null.
OPTIONAL_NODES = (
    "actor_rollout_ref.rollout.engine_kwargs.vllm",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config",
    "ray_kwargs.ray_init.runtime_env.env_vars",
)

RESUME_MODES = ("auto", "disable")


@dataclass(frozen=True)
class RunConfig:
    """name: of the run, one path component; dir: the folder that holds everything it writes (absolute once composed)."""

    name: str
    dir: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[\w.,=+@-]+", self.name) or set(self.name) == {"."}:
            raise UserError(f"run.name={self.name} must be one folder name of letters, digits and . , = + @ - _")
        if not isinstance(self.dir, str) or not self.dir:
            raise UserError(f"run.dir={self.dir} must be the path of a folder (quote one that is a number)")

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


def check_nodes(cfg: DictConfig, own: bool = False) -> None:
    """UserError where a node that jetrl reads is missing or holds a value. own: jetrl's nodes as well as VeRL's."""
    for key in (*(OWN_NODES if own else ()), *NODES, *OPTIONAL_NODES):
        node = OmegaConf.select(cfg, key)
        if isinstance(node, DictConfig) or (node is None and key in OPTIONAL_NODES):
            continue
        value = "null" if node is None else node
        raise UserError(f"{key}={value} is not possible: {key} is a group of keys; set single keys below it")


def check_roots(cfg: DictConfig, overrides: tuple[str, ...]) -> None:
    """UserError where `+name.key=value` made a node that nobody else has, and that nobody reads. cfg: composed."""
    added = {word.partition("=")[0].lstrip("+") for word in overrides if word.startswith("+")}
    for root in sorted({name.partition(".")[0] for name in added}):
        leaves = _leaves(cfg.get(root), root)
        if leaves and all(any(f"{leaf}.".startswith(f"{name}.") for name in added) for leaf in leaves):
            near = difflib.get_close_matches(root, [str(k) for k in cfg if k != root], n=1)
            word = next(w for w in overrides if w.lstrip("+").partition("=")[0].partition(".")[0] == root)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UserError(f"{word}: {root} is not a key{hint}, and nothing would read it; --cfg job prints all keys")


def _leaves(node: object, name: str) -> list[str]:
    if not isinstance(node, DictConfig) or not node:
        return [name]
    return [leaf for key in node for leaf in _leaves(node._get_node(key), f"{name}.{key}")]


def check_numbers(cfg: DictConfig) -> None:
    """UserError for a value in WHOLE_NUMBERS that is none, or is too small."""
    for key, smallest in WHOLE_NUMBERS.items():
        value = OmegaConf.select(cfg, key)
        if value is None and key in OPTIONAL:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            raise UserError(f"{key}={value} must be a whole number of at least {smallest}")


def steps_per_epoch(cfg: DictConfig, rows: int) -> int:
    """Whole batches in an epoch over `rows` training rows; UserError where there is not even one."""
    most = cfg.data.train_max_samples
    rows = min(rows, most) if most > 0 else rows
    if rows < cfg.data.train_batch_size:
        raise UserError(
            f"data.train_batch_size={cfg.data.train_batch_size} is more than the {rows} training rows; lower it"
        )
    return rows // cfg.data.train_batch_size


def _checked(node: str, cfg: DictConfig, cls: type) -> dict:
    data = OmegaConf.to_container(cfg[node], resolve=True)
    allowed = [f.name for f in fields(cls)]
    if not isinstance(data, dict):
        raise UserError(f"{node}={data} must have the keys {', '.join(allowed)}")
    for key in data:
        if key not in allowed:
            raise UserError(f"{node}.{key} is not a key of {node}; allowed: {', '.join(allowed)}")
    return data
