"""What the precision graph says of a run: `jetrl.check`'s own answer for the configuration that the run kept."""

from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jetrl.errors import UserError
from jetrl.reporting.groups import matters
from jetrl.reporting.runs import Run

# In a kept run's folder: its model's config.json (scripts/run_experiments.py).
MODEL = "model"
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
        job = read_job(OmegaConf.create(run.cfg))
    except (UserError, OmegaConfBaseException) as e:
        return Verdict(UNKNOWN, " ".join(str(e).split()))
    except (AttributeError, TypeError, ValueError) as e:  # a key that is missing, or no number where VeRL has one
        return Verdict(UNKNOWN, f"its configuration is not the whole one of a job ({' '.join(str(e).split())})")
    try:
        path = job.model_path
        if (run.path / MODEL / "config.json").is_file():  # what a run was kept with holds also where its model is not
            path = str(run.path / MODEL)
            job = replace(job, model_path=path)
        if bundled_name(path) is None and not Path(path).expanduser().is_dir():
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
    """All that verdict_of can depend on, and more: a key too many costs a check, a key too few a wrong verdict."""
    kept = ("actor_rollout_ref.", "data.", "trainer.")
    model = run.path / MODEL / "config.json"
    return repr([
        *((k, v) for k, v in run.flat.items() if k.startswith(kept) and matters(k)),
        model.read_text() if model.is_file() else None,
    ])  # fmt: skip
