"""After jetrl.warm no forward or backward of the job's shapes compiles a DeepGEMM kernel, whatever the number of rows."""

import os
import subprocess
import sys

import pytest

from jetrl import warm
from jetrl.precision.flow import PrecisionAssignment
from jetrl.precision.gemm_shapes import matrices, products

pytestmark = pytest.mark.gpu
MOST_ROWS = 2048
CONFIG = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 128,
}  # fmt: skip
# In a process of its own: DeepGEMM reads where its cache is when it is imported.
PASSES = f"""
import random, torch, jetrl_kernels.ops
from jetrl.linear import fp8_linear
from jetrl.precision.formats import LinearFormat
random.seed(0)
layers = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n, k in {{shapes}}]
for rows in [1, 33, 64, 65, {MOST_ROWS}, *(random.randint(1, {MOST_ROWS}) for _ in range(60))]:
    for weight in layers:
        x = torch.randn(rows, weight.shape[1], device="cuda", dtype=torch.bfloat16, requires_grad=True)
        fp8_linear(x, weight, None, LinearFormat.fp8_blockwise("fp32")).sum().backward()
torch.cuda.synchronize()
"""

WEIGHT_GRADIENTS = """
import os, torch, jetrl_kernels.ops
from pathlib import Path
from jetrl import warm
ops, counts = torch.ops.jetrl, []
for tokens in [512, 640, 1024, 1152, 1920, 2048, 4096]:
    dy, x = (torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16) for width in (512, 1024))
    kept = ops.requantize_blocks_transposed(*ops.quantize_tiles(x, "fp32"), 1024, "fp32")
    ops.gemm_nt(*ops.quantize_tiles_transposed(dy, "fp32"), *kept, "bfloat16", k_varies=True)
    counts.append(warm._kernels(Path(os.environ["DG_JIT_CACHE_DIR"])))
assert counts[0] >= 1 and len(set(counts)) == 1, counts
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty folder for DeepGEMM's kernels, which processes started by the test use."""
    if warm._backend("auto") != "deepgemm":
        pytest.skip("DeepGEMM is not installed")
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_weight_gradients_from_blocks_compile_one_kernel_for_all_numbers_of_tokens(cache):
    subprocess.run([sys.executable, "-c", WEIGHT_GRADIENTS], check=True)


def test_nothing_is_compiled_after_the_warm_up(cache):
    fp8 = PrecisionAssignment(linear="fp8")
    found = products(CONFIG, fp8, fp8, MOST_ROWS, MOST_ROWS, 1)
    warm.compile_all(found, len(os.sched_getaffinity(0)), "cuda")
    compiled = warm._kernels(cache)
    assert compiled >= len({(p.n, p.k) for p in found})
    shapes = [*matrices(CONFIG), *matrices(CONFIG, merged=False)]
    subprocess.run([sys.executable, "-c", PASSES.format(shapes=shapes)], check=True)
    assert warm._kernels(cache) == compiled
