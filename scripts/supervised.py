"""What the scripts share that teach a model by supervised steps: batches, the learning rate, the optimizer, one step."""

import math
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel


def padded(rows: Sequence[tuple[list[int], list[int]]], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, labels), both [rows, longest] int64, padded on the right; labels are -100 outside the answer.

    rows: (prompt, answer with its end of turn). padding: the token that fills ids.
    """
    ids = [torch.tensor(prompt + answer) for prompt, answer in rows]
    labels = [torch.tensor([-100] * len(prompt) + answer) for prompt, answer in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(ids, batch_first=True, padding_value=padding), pad(labels, batch_first=True, padding_value=-100)


def cosine_rate(step: int, highest: float, ramp: int, steps: int, lowest: float) -> float:
    """The learning rate: a ramp, then a cosine from `highest` to its share `lowest` at `steps`, where it stays."""
    done = min(1.0, step / steps)
    return highest * min(1.0, step / ramp) * (lowest + (1 - lowest) * (1 + math.cos(math.pi * done)) / 2)


def adamw(model: PreTrainedModel, rate: float) -> torch.optim.AdamW:
    fused = model.device.type == "cuda"
    return torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01, fused=fused)


def autocast(model: PreTrainedModel) -> torch.autocast:
    """BF16 on a GPU; on a CPU the model's own dtype."""
    return torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda")


def supervised_step(model: PreTrainedModel, optimizer, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """One update from a batch of `padded`, gradients clipped to norm 1; returns the loss before it."""
    ids, labels = ids.to(model.device), labels.to(model.device)
    # Padding stands on the right, where causal attention hides it: without a mask SDPA takes its fast path.
    with autocast(model):
        loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss
