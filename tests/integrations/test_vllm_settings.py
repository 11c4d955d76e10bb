"""What jetrl changes in a real vLLM configuration while a model is built, and what it leaves to the user."""

import pytest
from checkpoints_for_tests import save_checkpoint

# Importing vLLM takes half a minute here, and it inspects the architecture in a process of its own.
pytestmark = pytest.mark.slow

CHOSEN = {"flash_attn_max_num_splits_for_cuda_graph": 16}


@pytest.mark.parametrize(
    "arguments,splits",
    (
        ({}, 1),
        ({"attention_config": CHOSEN}, 16),
        ({"enforce_eager": True}, 32),  # vLLM reads it under CUDA graphs alone
        ({"additional_config": {"jetrl_flow": "fp8_rollout"}}, 32),  # its trainer shares nothing anyway
    ),
    ids=("unified", "user's choice", "eager", "not unified"),
)
def test_a_unified_rollout_splits_no_keys_unless_told_to(tmp_path, arguments, splits):
    from vllm.engine.arg_utils import EngineArgs

    from jetrl.integrations.vllm import engine

    settings = {"quantization": "jetrl", "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 64}
    checkpoint = str(save_checkpoint("qwen3", tmp_path))
    config = EngineArgs(checkpoint, dtype="bfloat16", **settings, **arguments).create_engine_config()
    for _ in range(2):  # every layer asks for it
        engine.prepare(config, config.quant_config.is_unified(config))
    assert config.attention_config.flash_attn_max_num_splits_for_cuda_graph == splits
