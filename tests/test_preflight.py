"""Every refusal before Ray starts: one sentence, exit code 2, nothing written."""

import os
import shutil
from collections import namedtuple
from importlib import metadata

import pytest
from launch_for_tests import composed, model_folder, words
from omegaconf import OmegaConf

from jetrl import train, versions
from jetrl.data import prepare
from jetrl.errors import UserError
from jetrl.launch import preflight
from jetrl.precision.tensor_parallel import first_cut_block, sharded_linears, working_sizes

ROLLOUT = "actor_rollout_ref.rollout"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
# config.json of Qwen/Qwen3-8B and Qwen/Qwen2.5-7B, as far as their shapes go.
QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 36,
}
QWEN25_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
}


FREQUENT = {
    "trainer.v1.sampler.custom_sampler.path": "pkg://jetrl.integrations.verl.replay_buffer",
    "trainer.v1.sampler.custom_sampler.name": "FrequentReplayBuffer",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return composed(tmp_path_factory.mktemp("base"))


@pytest.fixture
def job(base, tmp_path):
    """A job that would run, in a folder of its own; with(key=value, ...) changes VeRL's keys below the command line."""
    model_folder(tmp_path / "model")

    def with_(values=None, **model):
        cfg = base.copy()
        model_folder(tmp_path / "model", **model)
        for key, value in {
            "run.dir": str(tmp_path / "run"),
            "actor_rollout_ref.model.path": str(tmp_path / "model"),
            **(values or {}),
        }.items():
            OmegaConf.update(cfg, key, value, force_add=True)
        return cfg

    return with_


def refusal(cfg):
    with pytest.raises(UserError) as e:
        preflight.check(cfg)
    assert "\n" not in str(e.value)
    return str(e.value)


def test_a_job_without_a_sampler_group_passes(job):
    preflight.check(job({"trainer.v1.sampler.custom_sampler": None}))


def test_a_good_job_passes_and_nothing_is_written(job, tmp_path):
    preflight.check(job())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_empty_list_of_devices_is_refused_for_rays_imaginary_gpu(job, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES is empty" in refusal(job())


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"actor_rollout_ref.actor.strategy": "megatron"}, ["strategy=megatron", "allowed: fsdp, fsdp2"]),
        ({"actor_rollout_ref.actor.strategy": "veomni"}, ["strategy=veomni"]),
        ({"actor_rollout_ref.actor.strategy": "torchtitan"}, ["strategy=torchtitan"]),
        ({f"{ROLLOUT}.name": "sglang"}, ["rollout.name=sglang", "allowed: vllm"]),
        ({f"{ROLLOUT}.name": "trtllm"}, ["rollout.name=trtllm"]),
        ({"actor_rollout_ref.model.lora_rank": 8}, ["lora_rank=8", "LoRA"]),
        ({"actor_rollout_ref.model.lora.rank": 8}, ["lora.rank=8", "LoRA"]),
        ({"actor_rollout_ref.model.lora_adapter_path": "/a"}, ["lora_adapter_path=/a", "LoRA"]),
        ({"actor_rollout_ref.actor.qat.enable": True}, ["actor.qat.enable=True", "QAT"]),
        ({"actor_rollout_ref.actor.fsdp_config.qat.enable": True}, ["QAT"]),
        ({f"{ROLLOUT}.checkpoint_engine.backend": "delta_sharded"}, ["delta_sharded", "allowed: naive"]),
        ({f"{VLLM}.kv_cache_dtype": "fp8"}, ["kv_cache_dtype=fp8", "unified_fp8"]),
        ({"trainer.v1.trainer_mode": "colocate_async"}, ["trainer_mode=colocate_async", "allowed: sync"]),
        ({"trainer.v1.trainer_mode": "separate_async"}, ["trainer_mode=separate_async"]),
        ({"trainer.use_v1": False}, ["trainer.use_v1=False"]),
        ({"trainer.checkpoint_callback_class": "a.B"}, ["trainer.checkpoint_callback_class=a.B"]),
        ({"trainer.max_actor_ckpt_to_keep": 1}, ["trainer.max_actor_ckpt_to_keep=1"]),
        ({"actor_rollout_ref.actor.checkpoint.async_save": True}, ["async_save=True"]),
        (
            {**FREQUENT, "algorithm.filter_groups.enable": True},
            ["filter_groups.enable=True", "custom_sampler.name=FrequentReplayBuffer"],
        ),
        ({**FREQUENT, "trainer.v1.sampler.sync_refill_failed_groups": True}, ["sync_refill_failed_groups=True"]),
        ({f"{ROLLOUT}.quantization": "fp8"}, ["rollout.quantization=fp8", "precision=fp8_vllm"]),
        ({f"{VLLM}.quantization": None}, ["quantization=None", "needs jetrl"]),
        ({f"{VLLM}.additional_config.jetrl_flow": "unified_fp8_pow2"}, ["unified_fp8_pow2", "give both the same"]),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 2}, ["tensor_model_parallel_size=2", "1 GPUs"]),
        ({"actor_rollout_ref.model.path": "/nowhere"}, ["/nowhere", "does not exist"]),
        ({"actor_rollout_ref.model.override_config.attn_implementation": "flash_attention_2"}, ["flash-attn", "sdpa"]),
        ({"actor_rollout_ref.model.override_config.jetrl_flow": "fp4"}, ["fp4", "allowed: bf16"]),
        ({"actor_rollout_ref.actor.optim.lrr": 1}, ["optim.lrr", "did you mean lr?"]),
        ({"actor_rollout_ref.actor.optim.lr": "abc"}, ["optim.lr=abc must be a number"]),
        ({f"{ROLLOUT}.n": 2.5}, ["rollout.n=2.5 must be a whole number"]),
        ({"actor_rollout_ref.actor.loss_agg_mode": "nope"}, ["VeRL refuses", "nope"]),
        ({"data.train_batch_size": 8}, ["VeRL refuses", "train_batch_size (8)"]),
        ({"task.max_digits": 99}, ["task.max_digits=99"]),
        ({"trainer.device": "cuda", "trainer.n_gpus_per_node": 64}, ["n_gpus_per_node=64", "GPUs are visible"]),
        ({"gemm": "triton"}, ["gemm=triton cannot be", "needs a GPU", "'auto' takes the torch reference"]),
        ({f"{VLLM}.additional_config.jetrl_gem": "triton"}, ["jetrl_gem is not a key of jetrl", "jetrl_gemm"]),
        ({"run.dir": "/dev/null/run"}, ["run.dir=/dev/null/run", "/dev/null is not a folder"]),
    ],
)
def test_refused_by_name(job, changes, parts):
    text = refusal(job(changes))
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ({"num_experts": 8, "architectures": ["Qwen3MoeForCausalLM"]}, ["Qwen3MoeForCausalLM", "MoE experts"]),
        ({"num_local_experts": 8}, ["MoE experts"]),
        ({"n_routed_experts": 8}, ["MoE experts"]),
        ({"vision_config": {"depth": 1}}, ["vision tower"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["already quantized (fp8)"]),
    ],
)
def test_models_refused_by_name(job, model, parts):
    text = refusal(job(**model))
    assert "actor_rollout_ref.model.path=" in text
    for part in parts:
        assert part in text


def test_an_fp8_kv_cache_is_allowed_where_no_unity_is_claimed(job):
    preflight.check(
        job(
            {
                f"{VLLM}.kv_cache_dtype": "fp8",
                "actor_rollout_ref.model.override_config.jetrl_flow": "fp8_rollout",
                f"{VLLM}.additional_config.jetrl_flow": "fp8_rollout",
            }
        )
    )


def test_an_exclude_pattern_without_a_match_is_refused(tmp_path):
    text = refusal(composed(tmp_path, "flow.train.exclude=['*.z_proj']"))
    assert "*.z_proj" in text and "matches none" in text


def test_tensor_parallel_sizes_of_real_models():
    # Qwen3-8B: 8 kv heads of 128 rows, so up to 8 ranks cut between heads; 12288 / 8 = 1536 = 12 blocks; 12288 / 16 = 768
    # = 6 blocks with kv heads replicated. 32 ranks: 12288 / 32 = 384 = 3 blocks.
    assert working_sizes(sharded_linears(QWEN3_8B), 32) == [1, 2, 4, 8, 16, 32]
    # Qwen2.5-7B: 18944 = 148 blocks = 4 x 37, 28 heads: 8 does not divide the heads.
    assert working_sizes(sharded_linears(QWEN25_7B), 8) == [1, 2, 4]


def test_tp_that_cuts_a_block_names_layer_size_and_what_works(job):
    # 2 kv heads of 64 rows: two ranks would get half a block each; intermediate 512 / 4 = 128 is whole.
    tp = {f"{ROLLOUT}.tensor_model_parallel_size": 2, "trainer.n_gpus_per_node": 4}
    text = refusal(job(tp))
    assert "tensor_model_parallel_size=2" in text and "self_attn.k_proj" in text
    assert "128 elements" in text and "parts of 64" in text and "work on 4 GPUs: 1" in text
    cut = first_cut_block(sharded_linears({**QWEN3_8B, "intermediate_size": 320}), 2)
    assert (cut.name, cut.size) == ("mlp.gate_proj", 320)


def test_a_bf16_layer_may_be_cut(job):
    kv = ["*.k_proj", "*.v_proj"]
    linears = sharded_linears({**QWEN3_8B, "head_dim": 64})
    fp8 = {linear.name for linear in linears} - {name.replace("*", "self_attn") for name in kv}
    assert first_cut_block(linears, 16, lambda name: name in fp8) is None
    assert first_cut_block(linears, 16).name == "self_attn.k_proj"


def test_the_vllm_plugin_disabled_by_vllm_plugins(job, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    text = refusal(job())
    assert "VLLM_PLUGINS='other'" in text and "precision=unified_fp8" in text
    monkeypatch.setenv("VLLM_PLUGINS", "other,jetrl")
    preflight.check(job())
    monkeypatch.delenv("VLLM_PLUGINS")
    in_workers = {"ray_kwargs.ray_init.runtime_env.env_vars.VLLM_PLUGINS": ""}
    assert "VLLM_PLUGINS=''" in refusal(job(in_workers))


def test_the_vllm_plugin_not_installed(job, monkeypatch):
    real = metadata.entry_points
    monkeypatch.setattr(preflight.metadata, "entry_points", lambda **q: [e for e in real(**q) if e.name != "jetrl"])
    text = refusal(job())
    assert "vllm.general_plugins" in text and "pip install --no-deps" in text


def test_data_files_need_the_columns(job, tmp_path):
    import pyarrow
    import pyarrow.parquet

    task = {"name": "arithmetic", "seed": 0, "train_size": 32, "val_size": 8}
    task |= {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    train_file, val_file = prepare(task, tmp_path / "data")
    own = {"data.train_files": str(train_file), "data.val_files": str(val_file), "prepare_data": False}
    preflight.check(job(own))
    bad = tmp_path / "bad.parquet"
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(train_file).drop(["reward_model"]), bad)
    text = refusal(job({**own, "data.train_files": str(bad)}))
    assert "bad.parquet" in text and "reward_model" in text
    assert "does not exist" in refusal(job({**own, "data.val_files": str(tmp_path / "none.parquet")}))


def test_a_full_disk(job, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 2**40, 2**20))
    text = refusal(job())
    assert "0.0 GiB free" in text and "trainer.save_freq=-1" in text


def test_the_space_estimate_grows_with_the_model(job, monkeypatch):
    # 8 billion parameters x 12 bytes x 3 checkpoints is about 275 GiB.
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 100 * 2**30))
    preflight.check(job())
    big = {**QWEN3_8B, "vocab_size": 151936, "tie_word_embeddings": False}
    assert "job needs about" in refusal(job(**big))
    preflight.check(job({"trainer.save_freq": -1}, **big))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_output_folder(job, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    assert "not writable" in refusal(job({"run.dir": str(closed / "run")}))


def test_an_unwritable_output_folder_by_the_systems_answer(job, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "not writable" in refusal(job())


def test_wrong_versions_are_named_with_what_is_required(job, monkeypatch):
    real = metadata.version
    wrong = {"torch": "2.9.1+cu128", "verl": "0.8.0"}
    monkeypatch.setattr(versions.metadata, "version", lambda name: wrong.get(name) or real(name))
    text = refusal(job())
    assert "torch 2.9.1+cu128 (needs ==2.11.0)" in text and "verl 0.8.0 (needs ==0.9.1)" in text
    assert "transformers" not in text


def test_a_missing_package_is_named(monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions.metadata, "version", version)
    with pytest.raises(UserError, match="verl is not installed"):
        versions.check_versions(only=("verl",))


def test_a_local_build_of_the_right_version_is_right(monkeypatch):
    monkeypatch.setattr(versions.metadata, "version", lambda name: "2.11.0+cpu")
    versions.check_versions(only=("torch",))


def test_a_folder_with_another_flows_checkpoint_is_not_resumed(job, tmp_path):
    (tmp_path / "run" / "checkpoints" / "global_step_2").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(OmegaConf.to_yaml(job(), resolve=True))
    preflight.check(job())
    other = {
        "actor_rollout_ref.model.override_config.jetrl_flow": "unified_fp8_pow2",
        f"{VLLM}.additional_config.jetrl_flow": "unified_fp8_pow2",
    }
    text = refusal(job(other))
    assert "unified_fp8, and this one has unified_fp8_pow2" in text and "resume=disable" in text
    preflight.check(job({**other, "trainer.resume_mode": "disable"}))


def test_an_existing_verl_job_needs_two_overrides_only(job):
    """check_verl_config on VeRL's own keys: no node of jetrl's, and no flow named on either side."""
    cfg = job()
    OmegaConf.set_struct(cfg, False)
    for key in ("run", "task", "flow", "choices", "prepare_data", "resume"):
        cfg.pop(key)
    cfg.actor_rollout_ref.model.override_config.pop("jetrl_flow")
    engine = cfg.actor_rollout_ref.rollout.engine_kwargs.vllm
    engine.pop("additional_config")
    preflight.check_verl_config(cfg)
    engine.pop("quantization")
    with pytest.raises(UserError, match=r"\+actor_rollout_ref\.rollout\.engine_kwargs\.vllm\.quantization=jetrl"):
        preflight.check_verl_config(cfg)


@pytest.mark.parametrize(
    "word",
    ["model_engine=megatron", "actor_rollout_ref.rollout.name=sglang", "+actor_rollout_ref.actor.optim.nope=1"],
)
def test_at_the_command_line(tmp_path, capsys, word):
    assert train.main(words(tmp_path, word)) == 2
    out, err = capsys.readouterr()
    assert "Traceback" not in err and err.strip().splitlines()[-1].startswith("jetrl: ")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_dry_run_writes_nothing(tmp_path, capsys):
    assert train.main([*words(tmp_path), "--dry-run"]) == 0
    assert "would run in" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "changed,named",
    (
        (
            {"data.train_batch_size": 8, "actor_rollout_ref.actor.ppo_mini_batch_size": 8, f"{ROLLOUT}.n": 2},
            "ppo_micro_batch",
        ),
        ({f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 48}, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=48"),
        ({"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 48}, "ref.log_prob_micro_batch_size_per_gpu=48"),
        ({f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 48, f"{ROLLOUT}.log_prob_use_dynamic_bsz": True}, None),
    ),
)
def test_a_micro_batch_that_divides_no_batch_is_named(job, changed, named):
    """VeRL would assert it in a worker after the model is loaded."""
    if named is None:
        preflight.check(job(changed))
        return
    with pytest.raises(UserError, match=named):
        preflight.check(job(changed))
