"""Bundled model configs (sizes only, no weights), so that `jetrl.check` answers without a network."""

import json
from importlib import resources
from pathlib import Path

from jetrl.errors import UserError


def bundled() -> dict[str, dict]:
    """Every bundled entry by file name: {"names": hub ids it stands for, "config": keys of config.json}."""
    folder = resources.files(__package__)
    return {
        entry.name.removesuffix(".json"): json.loads(entry.read_text())
        for entry in sorted(folder.iterdir(), key=lambda e: e.name)
        if entry.name.endswith(".json")
    }


def bundled_name(path: str) -> str | None:
    """The bundled entry for a hub id, or None; a folder of that name comes first."""
    if Path(path).expanduser().is_dir():
        return None
    entries = bundled().items()
    return next((name for name, entry in entries if path.lower() in map(str.lower, entry["names"])), None)


def load_config(path: str) -> tuple[object, str]:
    """(Hugging Face config, where it came from) of `actor_rollout_ref.model.path`.

    A model folder first, then the bundled copies by hub id, then the hub. Raises UserError.
    """
    from transformers import AutoConfig

    from jetrl.launch.model_files import read_config

    name = bundled_name(path)
    if name is not None:
        source = f"bundled copy jetrl/precision/architectures/{name}.json"
        return _config(path, bundled()[name]["config"], AutoConfig), source
    source = "config.json of the model folder" if Path(path).expanduser().is_dir() else "config.json from the hub"
    return _config(path, read_config(path), AutoConfig), source


def _config(path: str, data: dict, auto_config) -> object:
    from huggingface_hub.errors import StrictDataclassError

    data = dict(data)
    model_type = data.pop("model_type", None)
    try:
        return auto_config.for_model(model_type, **data)
    except (ValueError, TypeError, StrictDataclassError) as e:
        # The whole list of Transformers' model types may follow on the first line.
        reason = " ".join(str(e).split())[:160]
        raise UserError(f"actor_rollout_ref.model.path={path}: config.json is of no known model type ({reason})") from e
