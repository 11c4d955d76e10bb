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
        ({"enforce_eager": True}, 1),
        ({"additional_config": {"jetrl_flow": "fp8_rollout"}}, 32),  # its trainer shares nothing anyway
    ),
    ids=("unified", "user's choice", "eager", "not unified"),
)
def test_a_unified_rollout_splits_no_keys_unless_told_to(tmp_path, arguments, splits):
    from jetrl.integrations.vllm import engine

    config = engine_config(tmp_path, **arguments)
    for _ in range(2):  # every layer asks for it
        engine.prepare(config, config.quant_config.is_unified(config))
    assert config.attention_config.flash_attn_max_num_splits_for_cuda_graph == splits
    assert config.attention_config.backend is None  # a CPU has an attention of its own


@pytest.mark.parametrize(
    "arguments,named",
    (
        ({}, None),
        ({"attention_config": {"backend": "FLASH_ATTN"}}, None),
        ({"attention_config": {"backend": "TRITON_ATTN"}}, "attention_config.backend=TRITON_ATTN"),
        ({"dtype": "float32"}, "torch.float32"),
        ({"hf_overrides": {"head_dim": 96}}, "heads of 96"),
        ({"attention_config": {"flash_attn_version": 2}}, "flash_attn_version=2"),
    ),
    ids=("default", "FA3 by name", "another backend", "FP32 carriers", "heads of 96", "FA2"),
)
def test_keys_stay_whole_where_fa3_can_do_it_and_the_log_says_where_not(
    tmp_path, monkeypatch, capsys, arguments, named
):
    """A GPU's part, with the machine's answers given: what tests/gpu and jetrl.verify measure on one.

    With FP32 carriers the attention is vLLM's in Triton, which names no precision for its dots: Triton's own is TF32.
    """
    from triton import knobs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from jetrl.integrations.vllm import engine, unsplit_attention

    config = engine_config(tmp_path, **arguments)
    before = config.attention_config.backend
    monkeypatch.setattr(engine.current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(unsplit_attention, "fa3_obstacle", lambda: None)
    with knobs.language.scope():
        for _ in range(2):
            engine.keep_keys_whole(config)
        assert knobs.language.fp32_default == ("ieee" if arguments.get("dtype") == "float32" else None)
    said = capsys.readouterr().out
    if named:
        assert config.attention_config.backend == before and named in said
    else:
        assert "the keys in one piece" in said
        assert AttentionBackendEnum.CUSTOM.get_class() is unsplit_attention.UnsplitBackend
        assert config.attention_config.backend is AttentionBackendEnum.CUSTOM
        assert config.attention_config.flash_attn_version == 3


def test_another_plug_ins_attention_backend_is_left_in_place_and_named(tmp_path, monkeypatch, capsys):
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from jetrl.integrations.vllm import engine, exact, unsplit_attention

    config = engine_config(tmp_path, logprobs_mode="processed_logprobs")
    path = f"{FlashAttentionBackend.__module__}.{FlashAttentionBackend.__qualname__}"
    AttentionBackendEnum.CUSTOM.clear_override()
    register_backend(AttentionBackendEnum.CUSTOM, path)
    try:
        monkeypatch.setattr(engine.current_platform, "is_cpu", lambda: False)
        monkeypatch.setattr(unsplit_attention, "fa3_obstacle", lambda: None)
        engine.keep_keys_whole(config)
        assert path in capsys.readouterr().out and config.attention_config.backend is None
        assert path in exact._obstacle(config)
        assert AttentionBackendEnum.CUSTOM.get_path() == path
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()


def test_a_prefix_added_apart_stands_against_whole_keys(tmp_path):
    from jetrl.integrations.vllm import unsplit_attention

    config = engine_config(tmp_path)
    config.model_config.disable_cascade_attn = False  # vLLM sets it on a CPU
    assert unsplit_attention.obstacle(config).startswith("disable_cascade_attn=False")


def engine_config(folder, **arguments):
    from vllm.engine.arg_utils import EngineArgs

    settings = {"quantization": "jetrl", "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 64}
    checkpoint = str(save_checkpoint("qwen3", folder))
    return EngineArgs(checkpoint, **({"dtype": "bfloat16"} | settings | arguments)).create_engine_config()
