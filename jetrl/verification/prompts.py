"""Prompts of a verification: the task's own validation prompts, or random token ids of given lengths."""

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf

from jetrl.data import TaskConfig, prepare
from jetrl.errors import UserError
from jetrl.verification.workspace import Options, Workspace

# Special tokens sit at either end of a vocabulary; random prompts keep away from the low end, where they would be read.
FIRST_RANDOM_ID = 16


def make_prompts(cfg: DictConfig, options: Options, space: Workspace, tokenizer, vocabulary: int) -> list[list[int]]:
    """options.sequences lists of token ids below `vocabulary`."""
    if options.prompt_lengths:
        generator = torch.Generator().manual_seed(options.seed)
        lengths = [options.prompt_lengths[i % len(options.prompt_lengths)] for i in range(options.sequences)]
        return [torch.randint(FIRST_RANDOM_ID, vocabulary, (n,), generator=generator).tolist() for n in lengths]
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise UserError("the model folder has no tokenizer with a chat template; give --prompt-lengths, as in 5,40,100")
    rows = _messages(cfg, space, options.sequences)
    return [_token_ids(tokenizer, rows[i % len(rows)]) for i in range(options.sequences)]


def _messages(cfg: DictConfig, space: Workspace, count: int) -> list[list[dict]]:
    import datasets

    if cfg.prepare_data:
        task = TaskConfig.from_dict(OmegaConf.to_container(cfg.task, resolve=True))
        files = [str(prepare(task, space.folder.parent / "data")[1])]
    else:
        value = cfg.data.val_files
        files = [str(f) for f in value] if isinstance(value, ListConfig) else [str(value)]
    kind = "parquet" if files[0].endswith(".parquet") else "json"
    rows = datasets.load_dataset(kind, data_files=files, split="train")
    return [rows[i][cfg.data.prompt_key] for i in range(min(count, len(rows)))]


def _token_ids(tokenizer, messages: list[dict]) -> list[int]:
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    return list(ids["input_ids"] if hasattr(ids, "keys") else ids)
