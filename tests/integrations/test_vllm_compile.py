"""torch.compile in a real vLLM engine: the pass fuses what it should, and a token keeps the bits of eager mode."""

import collections
import os

import pytest
import torch
import torch._inductor.config
import vllm.envs
from checkpoints_for_tests import save_checkpoint
from torch.fx.experimental.proxy_tensor import make_fx

pytestmark = pytest.mark.slow

PROMPTS = [[5, 9, 17, 33, 2], [7, 7, 1], list(range(40, 90))]


def generate(folder, eager: bool) -> list[tuple[list[int], list[float]]]:
    # An engine of an earlier test has frozen vLLM's view of the environment.
    vllm.envs.disable_envs_cache()
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_DISABLE_COMPILE_CACHE="1",
    )  # fmt: skip
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        str(folder), quantization="jetrl", skip_tokenizer_init=True, enforce_eager=eager, dtype="bfloat16",
        max_model_len=128, max_num_seqs=8, gpu_memory_utilization=0.1,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    del llm
    cleanup_dist_env_and_memory()
    first = [o.outputs[0] for o in outputs]
    return [
        (list(o.token_ids), [step[t].logprob for step, t in zip(o.logprobs, o.token_ids, strict=True)]) for o in first
    ]


def test_compiled_engine_fuses_and_has_the_bits_of_the_eager_one(tmp_path, monkeypatch):
    from jetrl.integrations.vllm.fusion import SharedOperatorFusion

    counted = []

    def counting(self, graph, fuse=SharedOperatorFusion.__call__):
        fuse(self, graph)
        counted.append(collections.Counter(n.target._opname for n in graph.nodes if hasattr(n.target, "_opname")))

    monkeypatch.setattr(SharedOperatorFusion, "__call__", counting)
    # A graph that comes out of a cache, from an earlier run of this test, goes through no pass.
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    folder = save_checkpoint("qwen3", tmp_path)
    eager = generate(folder, True)
    assert counted == []
    assert generate(folder, False) == eager
    # Two layers: four norms and two activations end in a quantizer; attention's output does not, nor the last norm.
    fused = sum(counted, collections.Counter())
    expected = {
        "rms_norm_quantize": 4, "silu_mul_quantize": 2, "quantize_tiles": 2, "gemm_nt": 8, "rms_norm": 1, "silu_mul": 0,
        "qk_norm_rotary": 2, "rotary": 0,
    }  # fmt: skip
    assert {name: fused[name] for name in expected} == expected


def test_a_tensor_that_is_also_read_unquantized_stays_as_it_is():
    from jetrl.integrations.vllm.fusion import SharedOperatorFusion

    ops = torch.ops.jetrl

    def quantized_twice(x, residual, weight):
        y, hidden, _ = ops.rms_norm(x, residual, weight, 1e-6)
        return ops.quantize_tiles(y, "fp32") + ops.quantize_tiles(y, "fp32") + (hidden,)

    def read_as_well(x, residual, weight):
        y, hidden, _ = ops.rms_norm(x, residual, weight, 1e-6)
        return ops.quantize_tiles(y, "fp32") + (hidden, y + 1)

    def in_two_formats(x, residual, weight):
        y, hidden, _ = ops.rms_norm(x, residual, weight, 1e-6)
        return ops.quantize_tiles(y, "fp32") + ops.quantize_tiles(y, "pow2") + (hidden,)

    torch.manual_seed(0)
    arguments = torch.randn(5, 192).bfloat16(), torch.randn(5, 192).bfloat16(), torch.randn(192).bfloat16()
    for function, fuses in ((quantized_twice, True), (read_as_well, False), (in_two_formats, False)):
        traced = make_fx(function, tracing_mode="fake")(*arguments)
        SharedOperatorFusion()(traced.graph)
        traced.recompile()
        for got, want in zip(traced(*arguments), function(*arguments), strict=True):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
        found = [n.target._opname for n in traced.graph.nodes if hasattr(n.target, "_opname")]
        assert found.count("rms_norm_quantize") == fuses, function.__name__
        assert ("quantize_tiles" in found) is not fuses
