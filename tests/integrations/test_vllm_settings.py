"""What jetrl changes in a real vLLM configuration while a model is built, and what it leaves to the user."""

import pytest
import torch
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


def test_an_exact_flow_refuses_what_stands_against_whole_keys_and_names_operator_and_key(tmp_path, monkeypatch):
    """Every sentence of both checks, on one configuration, with the machine's answers given."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from jetrl.errors import UserError
    from jetrl.integrations.vllm import exact, unsplit_attention

    config = engine_config(tmp_path, logprobs_mode="processed_logprobs")
    model, attention = config.model_config, config.attention_config
    parallel = config.parallel_config
    model.disable_cascade_attn = True
    heads = {"size": 64}
    monkeypatch.setattr(type(model), "get_head_size", lambda self: heads["size"])
    monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    monkeypatch.setattr(unsplit_attention, "fa3_obstacle", lambda: None)
    everywhere = (
        (attention, "backend", AttentionBackendEnum.TRITON_ATTN, "attention_config.backend=TRITON_ATTN (remove it)"),
        (config.cache_config, "cache_dtype", "fp8", "kv_cache_dtype=fp8 (set it to auto)"),
        (config.cache_config, "cache_dtype", "fp8_e5m2", "kv_cache_dtype=fp8_e5m2 (set it to auto)"),
        (model, "disable_cascade_attn", False, "disable_cascade_attn=False, which adds a common prefix apart"),
        (parallel, "decode_context_parallel_size", 2, "decode_context_parallel_size=2 (set it to 1)"),
    )
    on_a_gpu = (
        (attention, "backend", AttentionBackendEnum.CPU_ATTN, "attention_config.backend=CPU_ATTN (remove it)"),
        (attention, "flash_attn_version", 2, "attention_config.flash_attn_version=2 (remove it)"),
        (model, "dtype", torch.float16, "dtype=torch.float16: it was shown for torch.bfloat16"),
        (heads, "size", 96, "attention heads of 96: it was shown for 64, 128, 256"),
        (unsplit_attention, "fa3_obstacle", lambda: "no GPU is visible", "no GPU is visible"),
    )
    of_the_rest = (
        (parallel, "tensor_parallel_size", 2, "o_proj and down_proj ", "tensor_model_parallel_size=2; set it to 1"),
        (config, "speculative_config", object(), "log_softmax ", "remove speculative_config"),
        (config, "lora_config", object(), "linear layers ", "remove enable_lora"),
        (model, "logprobs_mode", "raw_logprobs", "log_softmax ", "logprobs_mode=processed_logprobs, not raw_logprobs"),
    )
    runner = (type(config), "use_v2_model_runner", False, "log_softmax ", "set VLLM_USE_V2_MODEL_RUNNER=1")
    attention_operator = "attention would have other bits than the trainer's, because of "
    for on_cpu in (True, False):
        monkeypatch.setattr(exact.current_platform, "is_cpu", lambda on_cpu=on_cpu: on_cpu)
        assert exact._obstacle(config) is None
        cases = [(*case[:3], attention_operator, case[3]) for case in (*everywhere, *(() if on_cpu else on_a_gpu))]
        for owner, key, value, operator, says in (*cases, *of_the_rest, *(() if on_cpu else (runner,))):
            with monkeypatch.context() as patch:
                set_one = patch.setitem if isinstance(owner, dict) else patch.setattr
                set_one(owner, key, value)
                with pytest.raises(UserError, match=r"^precision=unified_exact .*; or use precision=unified_fp8$") as e:
                    exact.prepare(config)
                assert f"cannot run this rollout: {operator}" in str(e.value) and says in str(e.value)
    assert exact._obstacle(config) is None
    unsplit_attention.install(config)  # what `prepare` does once nothing stands against it: every layer asks for it
    assert exact._obstacle(config) is None


def engine_config(folder, **arguments):
    from vllm.engine.arg_utils import EngineArgs

    settings = {"quantization": "jetrl", "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 64}
    checkpoint = str(save_checkpoint("qwen3", folder))
    return EngineArgs(checkpoint, **({"dtype": "bfloat16"} | settings | arguments)).create_engine_config()
