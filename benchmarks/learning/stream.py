"""The token stream of the learning comparison: the Python sources of the installed torch, as bytes.

Deterministic for a torch version and needs no network: files in the order of a hash of their path (so that kinds of code
mix), a blank line between them. Every 20th file is held out whole. Vocabulary: the 256 bytes.
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


def batch(text: torch.Tensor, number: int, rows: int, length: int, seed: int) -> torch.Tensor:
    """Batch `number` (from 0) of the stream that `seed` starts somewhere in `text`: (rows, length + 1) int64, on the CPU.

    Rows follow each other in the text and overlap by one token: the last target of one is the first input of the next.
    """
    size = rows * length
    start = (seed * 1_000_003 + number * size) % (len(text) - size - 1)
    window = text[start : start + size + 1].to(torch.int64)
    return window.unfold(0, length + 1, length)
