"""The command line of jetrl.train: what is a flag, what chooses from a jetrl group, what goes to VeRL as it is."""

import difflib
from dataclasses import dataclass, field, fields
from importlib import resources

from jetrl.errors import UserError
from jetrl.precision.flow import PrecisionAssignment

# jetrl's groups. VeRL has groups of its own called model, data and algorithm, which only its defaults list uses.
GROUPS = ("model", "data", "algorithm", "precision", "hardware", "experiment")

# What a group takes besides its files; resolved before they are looked up (launch/exact.py).
AUTOMATIC = {"precision": ("auto",)}

# jetrl's own plain keys, which may also be given with a `+`, as the groups may.
OWN_KEYS = ("run.name", "run.dir", "resume", "masters", "wire", "gemm")
# Keys that jetrl writes over whatever was given -> what to give instead.
_ENV = "ray_kwargs.ray_init.runtime_env.env_vars"
OWNED = {
    "trainer.default_local_dir": "run.dir=<folder>",
    "trainer.resume_mode": "resume=auto, disable or the path of a global_step_N folder",
    "trainer.resume_from_path": "resume=<path of a global_step_N folder>",
    "actor_rollout_ref.model.override_config.jetrl_flow": "precision=<name>",
    "actor_rollout_ref.model.override_config.jetrl_wire": "wire=fp8 or bf16",
    "actor_rollout_ref.model.override_config.jetrl_gemm": "gemm=<name>",
    "actor_rollout_ref.actor.fsdp_config.model_dtype": "masters=bf16 or fp32",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.jetrl_flow": "precision=<name>",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.jetrl_gemm": "gemm=<name>",
    f"{_ENV}.VERL_FILE_LOGGER_PATH": "run.dir=<folder>",
    f"{_ENV}.TENSORBOARD_DIR": "run.dir=<folder>",
}

FLAGS = "-m (--multirun), --dry-run, --cfg job, --help, --version"


@dataclass(frozen=True)
class CommandLine:
    """One normalized command line.

    choices: group -> value as typed (in a sweep this may be a comma list).
    overrides: every other Hydra override, in the order given.
    """

    choices: dict[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    multirun: bool = False
    dry_run: bool = False
    show_config: bool = False
    show_help: bool = False
    show_version: bool = False

    def hydra_overrides(self) -> list[str]:
        return [f"{group}@_global_={value}" for group, value in self.choices.items()] + list(self.overrides)


def parse(argv: list[str]) -> CommandLine:
    """Split argv (without the program) into flags, group choices and overrides; UserError for anything else."""
    flags: dict[str, bool] = {}
    choices: dict[str, str] = {}
    overrides: list[str] = []
    words = iter(argv)
    for word in words:
        if word in ("-m", "--multirun"):
            flags["multirun"] = True
        elif word == "--dry-run":
            flags["dry_run"] = True
        elif word in ("-h", "--help"):
            flags["show_help"] = True
        elif word == "--version":
            flags["show_version"] = True
        elif word in ("-c", "--cfg") or word.startswith("--cfg="):
            what = word.partition("=")[2] or next(words, "")
            if what != "job":
                raise UserError(f"--cfg {what} is unknown; allowed: --cfg job")
            flags["show_config"] = True
        elif word.startswith("-"):
            raise UserError(f"{word} is not a flag of jetrl.train; allowed: {FLAGS}, and key=value overrides")
        else:
            _add_override(word, choices, overrides)
    return CommandLine(choices=choices, overrides=tuple(overrides), **flags)


def _add_override(word: str, choices: dict[str, str], overrides: list[str]) -> None:
    key, equals, value = word.partition("=")
    name = key.lstrip("+~")
    if not equals and not key.startswith("~"):
        raise UserError(f"{word} is not an override; write key=value, and a group choice as in precision=bf16")
    if name in OWNED:
        raise UserError(f"{word}: jetrl.train sets {name} itself; give {OWNED[name]} instead")
    near = difflib.get_close_matches(name, GROUPS, n=1, cutoff=0.75)
    if near and name not in (near[0], f"{near[0]}@_global_"):
        # `+precison=bf16` would add a key that nothing reads, and the job would run with the default flow.
        raise UserError(f"{word}: {name} is neither a group nor a key; did you mean {near[0]}={value}?")
    group = name.removesuffix("@_global_")
    if group in GROUPS:
        if key.startswith("~") or not value:
            raise UserError(f"{word} does not choose a {group}; allowed: {_listing(group)}")
        choices[group] = value
    elif name.startswith("hydra.") or name == "hydra":
        raise UserError(f"{word}: jetrl.train takes no hydra.* keys; the output folder is run.dir=<folder>")
    elif name in OWN_KEYS and not key.startswith("~"):
        overrides.append(f"{name}={value}")
    else:
        overrides.append(_declare_flow_key(word, key, name))


def _declare_flow_key(word: str, key: str, name: str) -> str:
    """Let `flow.train.exclude=[...]` set a key that a flow's yaml leaves at its default (Hydra wants `++` there)."""
    known = {f"flow.{side}.{f.name}" for side in ("train", "rollout") for f in fields(PrecisionAssignment)}
    return f"++{word}" if key == name and name in known else word


def options(group: str) -> list[str]:
    """Names that jetrl ships for a group, sorted."""
    folder = resources.files("jetrl.configs") / group
    if not folder.is_dir():
        return []
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def check_choices(choices: dict[str, str]) -> None:
    """Refuse names that no group has, listing jetrl's own only (Hydra would list VeRL's files as well)."""
    for group, value in choices.items():
        allowed = [*AUTOMATIC.get(group, ()), *options(group)]
        if value not in options(group):
            raise UserError(f"{group}={value} is unknown{closest(value, allowed)}; allowed: {_listing(group)}")


def closest(value: str, allowed: list[str]) -> str:
    """` (did you mean x?)`, or nothing where no allowed value is near."""
    matches = difflib.get_close_matches(value, allowed, n=1)
    return f" (did you mean {matches[0]}?)" if matches else ""


def default_hardware() -> str:
    """8gpu, 1gpu or cpu by what is there."""
    import torch  # heavy, and --help does not need it

    count = torch.cuda.device_count()
    return "8gpu" if count >= 8 else "1gpu" if count >= 1 else "cpu"


def _listing(group: str) -> str:
    return ", ".join([*AUTOMATIC.get(group, ()), *options(group)]) or "none are shipped"
