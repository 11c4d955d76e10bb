"""The token stream of the learning comparison: the Python sources of the installed torch, as bytes.

Deterministic for a torch version and needs no network: files in the order of a hash of their path, a blank line between
them. Every 20th file is held out whole. Vocabulary: the 256 bytes.
"""

import hashlib
from functools import cache
from pathlib import Path

import torch

VOCABULARY = 256
HELD_OUT_EVERY = 20


@cache
def load() -> tuple[torch.Tensor, torch.Tensor, str]:
    """(training bytes, held-out bytes, both uint8 on the CPU; hex digest over both)."""
    folder = Path(torch.__file__).parent
    paths = sorted(
        (path.relative_to(folder).as_posix() for path in folder.rglob("*.py")),
        key=lambda name: hashlib.sha256(name.encode()).digest(),
    )
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, name in enumerate(paths):
        parts[number % HELD_OUT_EVERY == 0].append((folder / name).read_bytes() + b"\n\n")
    train, held_out = (b"".join(part) for part in parts)
    digest = hashlib.sha256(train + held_out).hexdigest()
    return *(torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (train, held_out)), digest


@cache
def _order(windows: int, seed: int) -> torch.Tensor:
    return torch.randperm(windows, generator=torch.Generator().manual_seed(seed))


def batch(text: torch.Tensor, number: int, rows: int, length: int, seed: int) -> torch.Tensor:
    """Batch `number` (from 0) of `text`: (rows, length + 1) int64, on the CPU.

    The text is cut into windows of `length` bytes, which `seed` shuffles; a row is one window and the byte after it. Rows of
    neighbouring windows would come from one file, and losses of such batches differ by tens of per cent.
    """
    windows = (len(text) - 1) // length
    at = torch.arange(number * rows, (number + 1) * rows) % windows
    starts = _order(windows, seed)[at] * length
    return text[starts[:, None] + torch.arange(length + 1)].to(torch.int64)
