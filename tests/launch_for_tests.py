"""What the launcher's tests share: model folders that are only a config.json, and the command line in this process."""

import json
from pathlib import Path

from omegaconf import DictConfig

from jetrl.launch.args import parse
from jetrl.launch.compose import compose_job

QWEN3_TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "tie_word_embeddings": True,
}


def model_folder(folder: Path, **changes: object) -> Path:
    """A model folder as pre-flight sees it: QWEN3_TINY with `changes`, no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**QWEN3_TINY, **changes}))
    return folder


def words(folder: Path, *more: str) -> list[str]:
    """A command line for a job on the CPU that writes only under `folder`."""
    model = model_folder(folder / "model")
    given = {word.partition("=")[0].lstrip("+") for word in more}
    base = [f"actor_rollout_ref.model.path={model}", f"run.dir={folder / 'run'}", "hardware=cpu"]
    return [word for word in base if word.partition("=")[0] not in given] + list(more)


def composed(folder: Path, *more: str) -> DictConfig:
    return compose_job(parse(words(folder, *more)))
