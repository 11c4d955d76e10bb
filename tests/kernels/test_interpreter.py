"""Runs the Triton kernel cases under Triton's interpreter, in a child process.

The interpreter must be chosen before triton is first imported, and other tests of the same session import it compiled.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

CASES = sorted(path.name for path in Path(__file__).parent.glob("cases_*.py"))


@pytest.mark.parametrize("cases", CASES)
def test_kernels_match_references_under_the_interpreter(cases):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(Path(__file__).parent / cases)]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
