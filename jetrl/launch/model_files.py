"""What can be known of a model from its config.json, before anything loads it."""

import json
from pathlib import Path

from jetrl.errors import UserError
from jetrl.precision.flow import PrecisionAssignment
from jetrl.precision.patterns import kept_unquantized
from jetrl.precision.tensor_parallel import sharded_linears

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
SIZE_KEYS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
OPTIONAL_SIZE_KEYS = ("num_key_value_heads", "head_dim")
VISION_KEYS = ("vision_config", "vision_tower", "visual")


def read_config(path: str) -> dict:
    """config.json of a model folder or of a Hugging Face repository (fetched: the job would fetch it anyway)."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        file = folder / "config.json"
        if not file.is_file():
            raise UserError(f"actor_rollout_ref.model.path={path} has no config.json: it is not a Hugging Face model")
    elif path.startswith(("/", ".", "~")) or path.count("/") != 1:
        raise UserError(
            f"actor_rollout_ref.model.path={path} does not exist; give a model folder or a Hugging Face repository "
            "(owner/name)"
        )
    else:
        file = _fetch(path)
    try:
        config = json.loads(file.read_text())
    except ValueError as e:
        raise UserError(f"actor_rollout_ref.model.path={path}: config.json is not JSON ({e})") from e
    if not isinstance(config, dict):
        raise UserError(f"actor_rollout_ref.model.path={path}: config.json is no JSON object")
    return config


def check_sizes(config: dict) -> None:
    """UserError unless config.json has the sizes of a Llama- or Qwen-like decoder, as whole numbers."""
    for key in SIZE_KEYS:
        if key not in config:
            raise UserError(f"the model's config.json has no {key}: jetrl knows Llama- and Qwen-like decoders")
    for key in (*SIZE_KEYS, *OPTIONAL_SIZE_KEYS):
        value = config.get(key)
        if value is None and key in OPTIONAL_SIZE_KEYS:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"the model's config.json has {key}={value}, which must be a whole number of at least 1")


def _fetch(repository: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    from huggingface_hub.utils import logging as hub_logging

    verbosity = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()  # its warnings about retries would stand before the one sentence
    try:
        return Path(hf_hub_download(repository, "config.json"))
    except LocalEntryNotFoundError as e:
        reason = "no connection, and it is not in the local cache"
        cause = e
    except (HfHubHTTPError, OSError) as e:
        reason = next(iter(str(e).splitlines()), type(e).__name__).strip().rstrip(".")
        cause = e
    finally:
        hub_logging.set_verbosity(verbosity)
    raise UserError(
        f"actor_rollout_ref.model.path={repository} is no folder and could not be fetched from Hugging Face ({reason}); "
        "give the path of a model folder"
    ) from cause


def parameter_count(path: str) -> int:
    """Parameters of a Llama- or Qwen-like decoder, from its config.json (norms and biases left out: under 0.1 %)."""
    config = read_config(path)
    hidden = config["hidden_size"]
    layer = sum(linear.size * hidden for linear in sharded_linears(config))
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return config["num_hidden_layers"] * layer + embeddings


def fp8_names(hf_config: dict, assignment: PrecisionAssignment, side: str) -> set[str]:
    """Names below a decoder layer that the assignment makes FP8 in at least one layer.

    side: "train" or "rollout", for the UserError about a pattern that matches nothing.
    """
    count = hf_config["num_hidden_layers"]
    short = {
        f"model.layers.{layer}.{linear.name}": linear.name
        for layer in range(count)
        for linear in sharded_linears(hf_config)
    }
    kept = kept_unquantized([*short, "lm_head"], assignment, count, {"lm_head": "always BF16"}, side)
    return {name for full, name in short.items() if full not in kept}
