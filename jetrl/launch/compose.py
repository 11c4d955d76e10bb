"""Compose one job: jetrl's groups over VeRL's PPO config, the flow wired in, the run's folder laid out.

Nothing here imports torch, Ray or VeRL, and nothing is written, so a mistake is answered at once.
"""

from importlib.util import find_spec
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from jetrl.calibration import apply_calibration
from jetrl.data.models import resolve_model_path
from jetrl.errors import UserError
from jetrl.launch import exact, wiring
from jetrl.launch.args import GROUPS, CommandLine, check_choices, default_hardware
from jetrl.launch.config import check_nodes, check_numbers, check_roots, resume_choice, run_config
from jetrl.launch.errors_map import check_grammar, explain
from jetrl.precision.flow import flow_from_dict

DEFAULT_ROOT = "runs"


def compose_job(
    line: CommandLine, name_suffix: str = "", root: str = DEFAULT_ROOT, resolve_model: bool = True
) -> DictConfig:
    """The job's configuration, complete and checked key by key, interpolations unresolved.

    name_suffix is appended to the default run name (a sweep over plain keys needs one); root is the folder of the
    default run.dir; resolve_model=False leaves the model's path as written (jetrl.check needs no weights). Raises
    UserError.
    """
    choices = dict(line.choices)
    automatic = choices.get("precision") == exact.AUTO
    if automatic:
        choices["precision"] = exact.EXACT
    check_choices(choices)
    if "hardware" not in choices:  # only then: it imports torch
        choices["hardware"] = default_hardware()
    cfg = _hydra(CommandLine(choices=choices, overrides=line.overrides))
    if automatic and (chosen := exact.resolve_auto(cfg)) != exact.EXACT:
        cfg = _hydra(CommandLine(choices=choices | {"precision": chosen}, overrides=line.overrides))
    try:
        _fill(cfg, name_suffix, root, resolve_model, chosen=tuple(line.choices))
        OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as e:
        raise explain(e, cfg) from e
    return cfg


def _hydra(line: CommandLine) -> DictConfig:
    for word in line.overrides:
        check_grammar(word)
    GlobalHydra.instance().clear()
    overrides = [*line.hydra_overrides(), f"hydra.searchpath=[file://{verl_config_folder()}]"]
    try:
        with initialize_config_module("jetrl.configs", version_base="1.3"):
            cfg = hydra_compose("jetrl", overrides=overrides, return_hydra_config=True)
            choices = {group: cfg.hydra.runtime.choices.get(f"{group}@_global_") for group in GROUPS}
            with open_dict(cfg):
                cfg.pop("hydra")
                # What was chosen, for titles, the run's name and the resume check.
                cfg.choices = choices
            check_roots(cfg, line.overrides)
            return cfg
    # TypeError: OmegaConf's, for `list.key`; ValueError: Hydra's, for `reward=null`.
    except (HydraException, OmegaConfBaseException, TypeError, ValueError) as e:
        raise explain(e, overrides=line.overrides) from e
    finally:
        GlobalHydra.instance().clear()


def verl_config_folder() -> Path:
    """VeRL's config folder, found without importing VeRL (6 s); UserError where VeRL is not installed."""
    spec = find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("verl is not installed; jetrl needs verl==0.9.1 (scripts/train.sh installs the whole stack)")
    return Path(spec.submodule_search_locations[0]) / "trainer" / "config"


def _fill(cfg: DictConfig, name_suffix: str, root: str, resolve_model: bool, chosen: tuple[str, ...]) -> None:
    """Defaults that depend on other values, then the wiring of flow, folders and resume."""
    check_nodes(cfg, own=True)
    check_numbers(cfg)
    if cfg.run.name is None:
        cfg.run.name = "-".join(str(cfg.choices[group]) for group in _naming_groups(cfg, chosen)) + name_suffix
    if cfg.run.dir is None:
        cfg.run.dir = str(Path(root) / str(cfg.run.name))
    folder = run_config(cfg).folder
    cfg.run.dir = str(folder.expanduser().absolute())
    run = run_config(cfg)
    if resolve_model:
        cfg.actor_rollout_ref.model.path = resolve_model_path(cfg.actor_rollout_ref.model.path)
    wiring.apply_flow(cfg, flow_from_dict(OmegaConf.to_container(cfg.flow, resolve=True)))
    apply_calibration(cfg)
    wiring.apply_masters(cfg)
    wiring.apply_settings(cfg)
    wiring.apply_lengths(cfg)
    wiring.apply_layout(cfg, run)
    wiring.apply_resume(cfg, resume_choice(cfg))


def _naming_groups(cfg: DictConfig, chosen: tuple[str, ...]) -> list[str]:
    """Groups whose choices make the default run name. An experiment stands for what it chooses itself."""
    groups = ["model", "data", "algorithm", "precision"]
    if cfg.choices["experiment"] is None:
        return groups
    return ["experiment", *(group for group in groups if group in chosen)]
