"""What one forward really executes equals what its graph declares, in both engines; and a difference is noticed."""

import os

import pytest
import torch
from checkpoints_for_tests import ARCHITECTURES, VOCAB, build_model
from transformers import AutoConfig, AutoModelForCausalLM

from jetrl.convert import convert
from jetrl.data.models import resolve_model_path
from jetrl.precision.build_hf import build_training_graph, declare_from_config
from jetrl.precision.build_vllm import build_rollout_graph
from jetrl.precision.flow import PrecisionAssignment
from jetrl.precision.probe import Probe

BF16 = PrecisionAssignment()
FP8 = PrecisionAssignment(linear="fp8")
MIXED = PrecisionAssignment(linear="fp8", scale_format="pow2", exclude=("*down_proj",), bf16_last_layers=1)
DOWN0 = "model.layers.0.mlp.down_proj"


def probed(model):
    with Probe(model) as probe, torch.no_grad():
        model(torch.arange(18).view(2, 9) % VOCAB)
    return probe


def converted(architecture, assignment, fuse=True):
    model = build_model(architecture).eval().to(torch.bfloat16)
    convert(model, build_training_graph(model, assignment), fuse_layers=fuse)
    return model


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("assignment", [BF16, FP8, MIXED], ids=["bf16", "fp8", "mixed"])
@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_the_trainers_forward_executes_the_declared_graph(architecture, assignment, fuse):
    model = converted(architecture, assignment, fuse)
    probe = probed(model)
    assert probe.differences(declare_from_config(model.config, assignment)) == []
    ran = {record.op for record in probe.records}
    assert ("jetrl::gemm_nt" in ran) == (assignment.linear == "fp8")


@pytest.mark.parametrize("assignment", [BF16, FP8], ids=["bf16", "fp8"])
def test_the_embedded_models_forward_in_the_trainer_executes_the_declared_graph(assignment):
    model = AutoModelForCausalLM.from_pretrained(resolve_model_path("pkg://jetrl.assets.tiny"), dtype=torch.bfloat16)
    convert(model, build_training_graph(model, assignment))
    assert probed(model).differences(declare_from_config(model.config, assignment)) == []


def test_a_layer_that_runs_otherwise_than_declared_is_named():
    probe = probed(converted("qwen3", FP8))
    config = build_model("qwen3").config
    excluded = PrecisionAssignment(linear="fp8", exclude=(DOWN0,))
    assert probe.differences(declare_from_config(config, excluded)) == [
        f"{DOWN0}: declared x bf16, weight bf16; "
        "executed x e4m3 tile_1x128 fp32-scale, weight e4m3 block_128x128 fp32-scale"
    ]
    pow2 = probe.differences(declare_from_config(config, PrecisionAssignment(linear="fp8", scale_format="pow2")))
    assert len(pow2) == 14 and all("declared x e4m3 tile_1x128 pow2-scale" in line for line in pow2)
    assert len(probed(converted("qwen3", BF16)).differences(declare_from_config(config, FP8))) == 14


def test_a_fused_layer_that_does_not_run_is_named_operator_by_operator():
    model = converted("qwen3", FP8)
    graph = declare_from_config(model.config, FP8)
    model.model.layers[1].forward = lambda hidden, **kwargs: hidden
    found = probed(model).differences(graph)
    # Seven linears, four norms, rotary, attention, activation and two residual additions.
    assert len(found) == 16 and all(line.startswith("model.layers.1.") for line in found), found


def test_what_does_not_run_and_what_is_not_declared_are_named():
    model = converted("qwen3", FP8, fuse=False)
    graph = declare_from_config(model.config, FP8)
    model.model.layers[1].input_layernorm.forward = lambda x: x
    model.model.norm.register_forward_hook(lambda m, a, out: out @ torch.eye(256).bfloat16())
    assert probed(model).differences(graph) == [
        "model.layers.1.input_layernorm: declared (norm), but nothing of the kind ran in it",
        "model.norm: aten::mm ran, but no linear is declared there",
    ]
    model.model.layers[0].mlp.down_proj.forward = lambda x: x[..., :256]
    assert f"{DOWN0}: declared, but no matrix product ran in {DOWN0}" in probed(model).differences(graph)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["jetrl", None])
def test_vllms_forward_executes_the_graph_read_off_its_model(quantization):
    """The embedded model, in vLLM-CPU; what is read off the live model is also what its configuration declares."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind"
    )
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(
        resolve_model_path("pkg://jetrl.assets.tiny"), quantization=quantization, skip_tokenizer_init=True, enforce_eager=True,
        dtype="bfloat16", max_model_len=64, max_num_seqs=4, gpu_memory_utilization=0.1,
    )  # fmt: skip
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    sampling = SamplingParams(max_tokens=2, temperature=0, detokenize=False)
    with Probe(model) as probe:
        llm.generate([{"prompt_token_ids": [5, 9, 17]}], sampling, use_tqdm=False)
    graph = build_rollout_graph(model)
    assert probe.differences(graph) == []
    config = AutoConfig.from_pretrained(resolve_model_path("pkg://jetrl.assets.tiny"))
    assert graph.digest() == declare_from_config(config, FP8 if quantization else BF16).digest()
    other = declare_from_config(config, BF16 if quantization else FP8)
    other.meta["merged"] = graph.meta["merged"]
    assert len(probe.differences(other)) >= 14
    del llm
    cleanup_dist_env_and_memory()
