"""The graph of real vLLM models, built in this process on the CPU without an engine around them."""

import pytest
import torch
from checkpoints_for_tests import ARCHITECTURES, build_model
from vllm_models_for_tests import vllm_models

from jetrl.precision.build_hf import build_training_graph, declare_from_config
from jetrl.precision.build_vllm import build_rollout_graph
from jetrl.precision.flow import PrecisionAssignment, load_flow
from jetrl.precision.formats import LinearFormat
from jetrl.precision.subgraph import check

# Importing vLLM takes half a minute here, and it inspects every architecture in a process of its own.
pytestmark = pytest.mark.slow

Q1 = "model.layers.1.self_attn.q_proj"
FP8 = PrecisionAssignment(linear="fp8")


@pytest.fixture(scope="module")
def vllm_model(tmp_path_factory):
    """Function (architecture, quantization, **engine arguments) -> the model that a vLLM worker would hold, weights unset."""

    def build(architecture: str, quantization: str | None, **arguments):
        return model_of(architecture, quantization=quantization, **arguments)[0]

    with vllm_models(tmp_path_factory.mktemp("vllm")) as model_of:
        yield build


def declared(architecture, assignment, **changes):
    return declare_from_config(build_model(architecture).config, assignment, **changes)


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_bf16_and_jetrl_graphs_equal_what_the_trainer_declares(vllm_model, architecture):
    for quantization, assignment in ((None, PrecisionAssignment()), ("jetrl", FP8)):
        graph = build_rollout_graph(vllm_model(architecture, quantization))
        assert graph.meta["unclassified"] == []
        assert check(graph, declared(architecture, assignment, training=True)) == []
        assert graph.digest() == declared(architecture, assignment).digest()


def test_vllms_own_fp8_left_active_is_found_and_described(vllm_model):
    graph = build_rollout_graph(vllm_model("qwen3", "fp8"))
    assert graph.meta["methods"] == ["Fp8PerTensorOnlineLinearMethod"]
    violations = check(graph, declared("qwen3", FP8, training=True))
    names = set(declared("qwen3", FP8).fp8_linear_names())
    assert {(v.operator, v.tensor) for v in violations} == {(n, t) for n in names for t in ("x", "weight")}
    assert len(violations) == 2 * len(names)
    first = next(v for v in violations if v.operator == Q1 and v.tensor == "weight")
    assert first.rollout == "e4m3 tensor fp32-scale by vllm's quantizer"
    assert first.key == "actor_rollout_ref.rollout.engine_kwargs.vllm.quantization"


def test_changes_in_the_live_model_are_named(vllm_model):
    model = vllm_model("qwen3", "jetrl")
    train = declared("qwen3", FP8, training=True)
    assert check(build_rollout_graph(model), train) == []

    # One layer with another scale format.
    layer = model.model.layers[1].self_attn.o_proj
    name = "model.layers.1.self_attn.o_proj"
    kept = layer.quant_method.formats
    layer.quant_method.formats = {name: LinearFormat.fp8_blockwise("pow2")}
    violations = check(build_rollout_graph(model), train)
    assert [(v.operator, v.tensor, v.key) for v in violations] == [
        (name, tensor, "flow.rollout.scale_format") for tensor in ("weight", "x")
    ]
    layer.quant_method.formats = kept

    # One layer swapped for vLLM's unquantized one: a merged layer is three logical matrices.
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    layer, kept = model.model.layers[0].self_attn.qkv_proj, model.model.layers[0].self_attn.qkv_proj.quant_method
    layer.quant_method = UnquantizedLinearMethod()
    violations = check(build_rollout_graph(model), train)
    expected = {(f"model.layers.0.self_attn.{n}_proj", tensor) for n in "qkv" for tensor in ("x", "weight")}
    assert {(v.operator, v.tensor) for v in violations} == expected and len(violations) == 6
    layer.quant_method = kept

    # A method that nothing is known about is listed, not guessed.
    class Strange:
        pass

    layer = model.model.layers[0].mlp.down_proj
    layer.quant_method = Strange()
    graph = build_rollout_graph(model)
    assert "model.layers.0.mlp.down_proj (RowParallelLinear with Strange)" in graph.meta["unclassified"]
    assert check(graph, train)


def test_an_exclusion_on_the_trainers_side_only_is_named(vllm_model):
    model = vllm_model("qwen3", "jetrl")
    train = build_training_graph(build_model("qwen3"), PrecisionAssignment(linear="fp8", exclude=(Q1,)))
    violations = check(build_rollout_graph(model), train)
    assert [(v.operator, v.tensor, v.key) for v in violations] == [
        (Q1, t, "flow.train.exclude") for t in ("weight", "x")
    ]


def test_a_flow_named_to_vllm_reaches_the_live_graph(vllm_model):
    graph = build_rollout_graph(vllm_model("qwen3", "jetrl", additional_config={"jetrl_flow": "unified_fp8_pow2"}))
    assert graph.digest() == declared("qwen3", load_flow("unified_fp8_pow2").rollout).digest()
    violations = check(graph, declared("qwen3", FP8, training=True))
    assert {v.key for v in violations} == {"flow.rollout.scale_format"}


def test_float32_carriers_are_read_from_the_model(vllm_model):
    from jetrl.precision.formats import FP32

    graph = build_rollout_graph(vllm_model("qwen3", "jetrl", dtype="float32"))
    assert graph.digest() == declared("qwen3", FP8, carrier=FP32).digest()
    violations = check(graph, declared("qwen3", FP8, training=True))
    assert violations and {v.key for v in violations} == {"actor_rollout_ref.rollout.dtype"}
    assert torch.get_default_dtype() == torch.float32


def test_block_fp8_layers_are_described_by_the_kernel_they_selected(vllm_model):
    """VeRL's rollout.quantization=fp8 is vLLM's Fp8LinearMethod on 128x128 blocks, which this CPU may not select a kernel for.

    So its method and kernels are constructed here without the selection; what they say of themselves is real.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
    from vllm.model_executor.kernels.linear.scaled_mm.deep_gemm import DeepGemmFp8BlockScaledMMKernel
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearLayerConfig
    from vllm.model_executor.kernels.linear.scaled_mm.triton import TritonFp8BlockScaledMMKernel
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod

    model = vllm_model("qwen3", None)
    layer = model.model.layers[0].mlp.down_proj
    name = "model.layers.0.mlp.down_proj"
    with set_current_vllm_config(VllmConfig()):
        layer.quant_method = method = Fp8LinearMethod.__new__(Fp8LinearMethod)
        method.quant_config = Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=[128, 128])
        method.weight_quant_key, method.activation_quant_key = block_keys()
        config = FP8ScaledMMLinearLayerConfig(
            weight_quant_key=method.weight_quant_key, activation_quant_key=method.activation_quant_key,
            weight_shape=(256, 512), input_dtype=torch.bfloat16, out_dtype=torch.bfloat16,
        )  # fmt: skip
        seen = {}
        for kernel in (TritonFp8BlockScaledMMKernel, DeepGemmFp8BlockScaledMMKernel, CPUFp8BlockScaledMMKernel):
            method.fp8_linear = kernel(config)
            fmt = build_rollout_graph(model).linear_format(name)
            seen[kernel.__name__] = (str(fmt.x), str(fmt.weight))
        # On Hopper DeepGEMM rounds scales up to powers of two unless VLLM_USE_DEEP_GEMM_E8M0=0.
        method.fp8_linear = DeepGemmFp8BlockScaledMMKernel(config)
        method.fp8_linear.use_deep_gemm_e8m0 = True
        hopper = build_rollout_graph(model).linear_format(name)
    fp32 = ("e4m3 tile_1x128 fp32-scale", "e4m3 block_128x128 fp32-scale")
    assert seen["TritonFp8BlockScaledMMKernel"] == seen["DeepGemmFp8BlockScaledMMKernel"] == fp32
    # vLLM's CPU kernel keeps activations BF16.
    assert seen["CPUFp8BlockScaledMMKernel"] == ("bf16", "e4m3 block_128x128 fp32-scale")
    assert str(hopper.x) == "e4m3 tile_1x128 pow2-scale" and hopper == declared(
        "qwen3", load_flow("fp8_vllm").rollout
    ).linear_format(name)


def block_keys():
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8Static128BlockSym

    return kFp8Static128BlockSym, kFp8Dynamic128Sym
