"""What the precision graph says of a run: `jetrl.check`'s own answer for the configuration that the run kept."""

from dataclasses import dataclass

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jetrl.errors import UserError
from jetrl.reporting.runs import Run

UNIFIED, DECLARED, VIOLATED, UNKNOWN = "unified", "not unified", "violated", "not checked"


@dataclass(frozen=True)
class Verdict:
    """state: one of the four above. sentence: the check's verdict, or why there is none."""

    state: str
    sentence: str


def verdict_of(run: Run) -> Verdict:
    """Builds both declared graphs (meta device, no weights). A run that cannot be described says why instead."""
    if run.cfg is None:
        return Verdict(UNKNOWN, "no configuration beside the metrics, so its precision flow is not known")
    # torch and transformers take seconds to import, and a report on plain VeRL metrics needs neither.
    from jetrl.precision.architectures import bundled_name
    from jetrl.precision.check_job import check_job
    from jetrl.precision.job import read_job

    try:
        job = read_job(run.cfg)
        path = job.model_path
        if bundled_name(path) is None and not _is_folder(path):
            # load_config would ask the hub: a report reads what is here.
            return Verdict(UNKNOWN, f"the model's config.json is not readable here ({path})")
        result = check_job(job)
    except (UserError, OmegaConfBaseException) as e:
        return Verdict(UNKNOWN, " ".join(str(e).split()))
    if not result.violations:
        return Verdict(UNIFIED, result.verdict)
    return Verdict(VIOLATED if job.unified else DECLARED, result.verdict)


def verdicts(runs: list[Run]) -> dict[str, Verdict]:
    """By run name. Runs that say the same about model and precision (seeds) are checked once."""
    known: dict[str, Verdict] = {}
    result = {}
    for run in runs:
        key = _precision_part(run)
        if key not in known:
            known[key] = verdict_of(run)
        result[run.name] = known[key]
    return result


def _precision_part(run: Run) -> str:
    if run.cfg is None:
        return ""
    keys = ("actor_rollout_ref.model", "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "data", "trainer")
    parts = [OmegaConf.to_container(OmegaConf.select(run.cfg, key) or OmegaConf.create({})) for key in keys]
    for part in parts:
        _drop_names(part)
    return repr(parts)


def _drop_names(part: dict) -> None:
    for key in ("seed", "trace", "prometheus", "experiment_name", "default_local_dir", "train_files", "val_files"):
        part.pop(key, None)


def _is_folder(path: str) -> bool:
    from pathlib import Path

    return Path(path).expanduser().is_dir()
