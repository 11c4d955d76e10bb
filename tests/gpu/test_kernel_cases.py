"""The Triton kernel cases of tests/kernels, compiled on the GPU, and rows past 2**31 elements."""

import subprocess
import sys
from pathlib import Path

import jetrl_kernels.ops  # noqa: F401
import pytest
import torch

pytestmark = pytest.mark.gpu
CASES = Path(__file__).parents[1] / "kernels"


@pytest.mark.parametrize("cases", sorted(path.name for path in CASES.glob("cases_*.py")))
def test_compiled_kernels_match_references(cases):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES / cases)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


def test_quantizers_reach_past_two_to_the_31_elements():
    rows, columns, tail = 2**31 // 4096 + 512, 4096, 256
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    codes, scale, codes_t, scale_t = torch.ops.jetrl.quantize_tiles_both(x, "fp32")
    expected = torch.ops.jetrl.quantize_tiles_both(x[-tail:], "fp32")
    again = torch.ops.jetrl.requantize_tiles_transposed(codes, scale, columns, "fp32")
    expected_again = torch.ops.jetrl.requantize_tiles_transposed(expected[0], expected[1], columns, "fp32")
    for got, want in (
        (codes[-tail:], expected[0]),
        (scale[-tail:], expected[1]),
        (codes_t[:, -tail:], expected[2]),
        (scale_t[:, -tail // 128 :], expected[3]),
        (again[0][:, -tail:], expected_again[0]),
        (again[1][:, -tail // 128 :], expected_again[1]),
    ):
        assert torch.equal(got.to(torch.float32), want.to(torch.float32))
