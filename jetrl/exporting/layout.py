"""vLLM's stock block-FP8 checkpoint: which weights it holds as codes, and what config.json says of them.

The format is DeepSeek-V3's, as vLLM 0.24 and transformers' FineGrainedFP8 read it: `<name>.weight` in E4M3 of the true
size, `<name>.weight_scale_inv` in float32 with one value per 128x128 block, by which a code is multiplied.
"""

from transformers import AutoConfig

from jetrl.errors import UserError
from jetrl.precision.build_hf import declare_from_config
from jetrl.precision.flow import Flow
from jetrl.precision.tensor_parallel import sharded_linears

BLOCK = 128
# vLLM stacks these into one matrix, and its stock layer then wants each to start at a block's edge.
MERGED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def fp8_weights(config: dict, flow: Flow) -> tuple[dict[str, str], list[str]]:
    """Canonical name -> scale format of every linear layer that the flow's rollout runs in FP8, and the names of the others.

    Raises UserError for a flow without an FP8 rollout and for sizes that vLLM's stock layer refuses.
    """
    if flow.rollout.linear != "fp8":
        raise UserError(
            f"the flow {flow.name} has a {flow.rollout.linear} rollout; allowed with --format fp8: an FP8 flow"
        )
    fields = {key: value for key, value in config.items() if key != "model_type"}
    try:
        hf_config = AutoConfig.for_model(config["model_type"], **fields)
    except (KeyError, ValueError) as e:
        raise UserError(
            f"model_type={config.get('model_type')} in config.json is not one that transformers knows; it is needed for "
            "--format fp8"
        ) from e
    graph = declare_from_config(hf_config, flow.rollout)
    formats = {name: graph.linear_format(name) for name in graph.linear_names()}
    found = {name: fmt.weight.scale_format for name, fmt in formats.items() if fmt and fmt.is_fp8}
    for linear in sharded_linears(config):
        short = linear.name.rpartition(".")[2]
        if short in MERGED and linear.size % BLOCK and any(name.endswith(linear.name) for name in found):
            raise UserError(
                f"vLLM's stock block FP8 cannot hold {linear.name}: it stacks it with others, and its {linear.size} rows "
                f"are no multiple of {BLOCK}; export --format bf16 and serve it with quantization=jetrl"
            )
    return found, sorted(name for name in formats if name not in found)


def quantization_config(kept: list[str]) -> dict:
    """config.json's section. kept: layers that stay BF16, named under both keys that readers look for."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": kept,
        "ignored_layers": kept,
    }
