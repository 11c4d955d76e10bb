"""Fixtures of the kernel cases; run on a GPU when there is one, else by Triton's interpreter (see test_interpreter.py)."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # hostile_data


@pytest.fixture
def generator() -> torch.Generator:
    """Fresh data each run; the seed is printed with a failure, so that it can be repeated."""
    generator = torch.Generator()
    print("seed", generator.seed())
    return generator
