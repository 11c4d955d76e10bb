"""From what a user writes as a model to what VeRL and vLLM can open."""

import re
from importlib import resources
from pathlib import Path

from jetrl.errors import UserError

PACKAGED = "pkg://"
TINY = PACKAGED + "jetrl.assets.tiny"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
REMOTE = ("hdfs://", "s3://")
# Where the checkout's scripts write models (no owner on the hub is called that) -> what makes one there, by its name.
MADE = "models/"
MAKERS = {
    "smollm2": "python scripts/convert_smollm2.py --out {path}",
    "": "python scripts/warm_up_model.py --length <task.length> --out {path}",
}


def resolve_model_path(path: str) -> str:
    """`actor_rollout_ref.model.path` as VeRL needs it.

    "pkg://package.folder" becomes that folder's path, an existing local folder its absolute path; a hub id
    ("owner/name") and a remote address stay as they are. Raises UserError for a local path that does not exist or is
    no model folder, for a folder that a script has yet to make, and for a hub id that is not in the cache while the hub
    is switched off.
    """
    path = str(path)
    if path.startswith(PACKAGED):
        return str(_packaged_folder(path))
    if path.startswith(REMOTE):
        return path
    folder = Path(path).expanduser()
    if folder.exists():
        if not (folder / "config.json").is_file():
            raise UserError(f"actor_rollout_ref.model.path={path} has no config.json; give a Hugging Face model folder")
        return str(folder.resolve())
    if path.startswith(MADE):
        maker = next(command for name, command in MAKERS.items() if path.removeprefix(MADE).startswith(name))
        raise UserError(f"actor_rollout_ref.model.path={path} is not made yet; run `{maker.format(path=path)}` first")
    if not HUB_ID.fullmatch(path):
        raise UserError(
            f"actor_rollout_ref.model.path={path} does not exist; give an existing model folder, a hub id like "
            "Qwen/Qwen3-8B, or model=tiny for the embedded one"
        )
    _check_reachable(path)
    return path


def _packaged_folder(path: str) -> Path:
    package, _, name = path.removeprefix(PACKAGED).rpartition(".")
    try:
        folder = Path(str(resources.files(package) / name))
    except (ModuleNotFoundError, TypeError, ValueError) as e:  # the last two: no package, or dots, before the name
        raise UserError(
            f"actor_rollout_ref.model.path={path} names no installed package; the embedded model is {TINY}"
        ) from e
    if not (folder / "config.json").is_file():
        raise UserError(f"actor_rollout_ref.model.path={path} is no model folder; the embedded model is {TINY}")
    return folder


def _check_reachable(hub_id: str) -> None:
    """Refuse now what would end in a traceback after Ray has started: switched-off hub, model not in the cache."""
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.is_offline_mode() and not isinstance(try_to_load_from_cache(hub_id, "config.json"), str):
        raise UserError(
            f"actor_rollout_ref.model.path={hub_id} is not in the local Hugging Face cache and HF_HUB_OFFLINE is set; "
            "unset it, or give the path of a model folder"
        )
