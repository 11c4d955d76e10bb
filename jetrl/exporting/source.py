"""What can be exported: a VeRL FSDP checkpoint or a Hugging Face folder, as named whole tensors and a configuration."""

import contextlib
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from jetrl.errors import UserError
from jetrl.launch.checkpoints import MARKER, why_not_whole

# VeRL writes its override_config into the model's configuration, jetrl's keys among them.
OWN_KEY = re.compile(r"jetrl_\w+")


@dataclass(frozen=True)
class Source:
    """weights(): (name, tensor) in any float dtype, a tied lm_head included or not; config: config.json without jetrl's keys.

    flow: wire form of the precision flow the model was trained with, None where the folder does not say.
    files: tokenizer and the like, to be copied as they are.
    """

    config: dict
    flow: str | None
    files: tuple[Path, ...]
    folder: Path
    is_checkpoint: bool

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return _merged_shards(self.folder) if self.is_checkpoint else _safetensors(self.folder)


def open_source(path: Path) -> Source:
    """path: global_step_N, its folder `actor`, or a Hugging Face folder with safetensors. Raises UserError."""
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; give a global_step_N folder or a Hugging Face model folder")
    if (path / MARKER).is_file():
        reason = why_not_whole(path)
        if reason:
            raise UserError(f"{path} is not a whole checkpoint ({reason}); give another global_step_N folder")
    actor = path / "actor" if (path / "actor").is_dir() else path
    if (actor / "fsdp_config.json").is_file():
        config, flow = _config(actor / "huggingface")
        return Source(config, flow, _companions(actor / "huggingface"), actor, is_checkpoint=True)
    if not (path / "config.json").is_file():
        raise UserError(
            f"{path} has neither fsdp_config.json (a VeRL FSDP checkpoint) nor config.json (a Hugging Face model); "
            "give a global_step_N folder or a Hugging Face model folder"
        )
    config, flow = _config(path)
    if config.get("quantization_config"):
        raise UserError(f"{path} is already quantized; give the BF16 model or a VeRL checkpoint")
    return Source(config, flow, _companions(path), path, is_checkpoint=False)


def _config(folder: Path) -> tuple[dict, str | None]:
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError as e:
        raise UserError(f"{folder} has no config.json; the checkpoint is not whole") from e
    except ValueError as e:
        raise UserError(f"{file} is not JSON ({e}); the checkpoint is damaged") from e
    if not isinstance(config, dict):
        raise UserError(f"{file} is no JSON object; the checkpoint is damaged")
    return {key: value for key, value in config.items() if not OWN_KEY.fullmatch(key)}, config.get("jetrl_flow")


def _companions(folder: Path) -> tuple[Path, ...]:
    """Everything in the folder that is neither weights nor config.json."""
    weights = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
    return tuple(
        sorted(f for f in folder.iterdir() if f.is_file() and f.name != "config.json" and not f.name.endswith(weights))
    )


def _safetensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (safe_open is no dict)
                    yield name, tensors.get_tensor(name)
        except SafetensorError as e:
            raise UserError(f"{file} cannot be read ({e}); copy the model again") from e


def _weight_files(folder: Path) -> list[Path]:
    """Those that transformers would load: the index's where there is one, else model.safetensors. All must be there."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as e:
            raise UserError(f"{index} names no weight files; copy the model again") from e
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"{folder} lacks {missing[0]} ({len(missing)} of {len(names)} weight files missing); copy the model again, or "
            "save it with transformers' save_pretrained"
        )
    return [folder / name for name in names]


def _merged_shards(actor: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """VeRL's own merger reads the shards of FSDP1 and FSDP2, rounds them to BF16 and joins them."""
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    merger = FSDPModelMerger(
        ModelMergerConfig("merge", "fsdp", local_dir=str(actor), hf_model_config_path=str(actor / "huggingface"))
    )
    with contextlib.redirect_stdout(io.StringIO()):  # it reports every step it takes
        try:
            world = merger._get_world_size()
            first = merger._load_rank_zero_state_dict(world)
            mesh, names = merger._extract_device_mesh_info(first, world)
            shards, shape = merger._calculate_shard_configuration(mesh, names)
            merged = merger._load_and_merge_state_dicts(world, shards, shape, names)
        except (FileNotFoundError, EOFError, RuntimeError, ValueError, KeyError) as e:
            raise UserError(f"{actor} cannot be read ({' '.join(str(e).split())}); give a whole checkpoint") from e
    yield from sorted(merged.items())
