"""Both exports in stock vLLM, jetrl's plug-in switched off (tests/gpu/export_serves.py says what must hold)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[1] / "gpu" / "export_serves.py"
SERVED = {"bf16": ("UnquantizedLinearMethod", "torch.bfloat16"), "fp8": ("Fp8LinearMethod", "torch.float8_e4m3fn")}


@pytest.mark.slow
def test_stock_vllm_gives_the_log_probabilities_of_both_exports(tmp_path):
    # vLLM-CPU multiplies block FP8 with AMX only.
    takes_fp8 = torch.cuda.is_available() or torch.cpu._is_amx_tile_supported()
    forms = ["bf16", "fp8"] if takes_fp8 else ["bf16"]
    out = tmp_path / "serve.json"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run([sys.executable, str(SCRIPT), str(out), *forms], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert {form: (found[form]["method"], found[form]["weight"]) for form in forms} == {f: SERVED[f] for f in forms}
