"""What a command line becomes: VeRL's configuration with jetrl's groups over it and the flow on both sides."""

import json
from pathlib import Path

import pytest
from launch_for_tests import composed, words
from omegaconf import OmegaConf

from jetrl import train
from jetrl.errors import UserError
from jetrl.launch.args import options
from jetrl.precision.flow import flow_names, load_flow


def rollout_of(cfg):
    return cfg.actor_rollout_ref.rollout


def test_jetrls_groups_win_over_verl_and_the_user_over_both(tmp_path):
    cfg = composed(tmp_path)
    assert cfg.algorithm.adv_estimator == "grpo"  # VeRL: gae
    assert cfg.actor_rollout_ref.actor.strategy == "fsdp2"  # VeRL: fsdp
    assert cfg.actor_rollout_ref.actor.use_kl_loss  # or VeRL makes no reference policy
    cfg = composed(tmp_path, "algorithm.adv_estimator=gae", "++actor_rollout_ref.actor.strategy=fsdp")
    assert (cfg.algorithm.adv_estimator, cfg.actor_rollout_ref.actor.strategy) == ("gae", "fsdp")


def test_defaults_and_the_name_and_folder_of_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = [word for word in words(tmp_path) if not word.startswith("run.dir")]
    cfg = composed_from(argv)
    assert cfg.run.name == "tiny-arithmetic-grpo-unified_fp8"
    assert Path(cfg.run.dir) == tmp_path / "runs" / cfg.run.name
    assert Path(cfg.trainer.default_local_dir) == Path(cfg.run.dir) / "checkpoints"
    assert cfg.trainer.experiment_name == cfg.run.name
    env = cfg.ray_kwargs.ray_init.runtime_env.env_vars
    assert env.VERL_FILE_LOGGER_PATH == f"{cfg.run.dir}/metrics.jsonl"
    assert "VERL_FILE_LOGGER_PATH" in composed(tmp_path, "hardware=8gpu").ray_kwargs.ray_init.runtime_env.env_vars
    assert composed_from([*argv, "run.name=mine"]).run.dir == str(tmp_path / "runs" / "mine")


def composed_from(argv):
    from jetrl.launch.args import parse
    from jetrl.launch.compose import compose_job

    return compose_job(parse(argv))


@pytest.mark.parametrize("name", flow_names())
def test_a_flow_reaches_both_sides(tmp_path, name):
    cfg, flow = composed(tmp_path, f"precision={name}"), load_flow(name)
    assert cfg.actor_rollout_ref.model.external_lib == "jetrl.integrations.verl"
    assert cfg.actor_rollout_ref.model.override_config.jetrl_flow == name
    assert rollout_of(cfg).engine_kwargs.vllm.additional_config.jetrl_flow == name
    wanted = "jetrl" if flow.rollout.linear == "fp8" else None
    assert rollout_of(cfg).engine_kwargs.vllm.get("quantization") == wanted
    assert rollout_of(cfg).quantization == ("fp8" if flow.rollout.linear == "vllm_fp8" else None)


def test_a_changed_flow_goes_out_as_json_the_same_on_both_sides(tmp_path):
    cfg = composed(tmp_path, "flow.train.bf16_first_layers=1")
    wire = cfg.actor_rollout_ref.model.override_config.jetrl_flow
    assert rollout_of(cfg).engine_kwargs.vllm.additional_config.jetrl_flow == wire
    assert json.loads(wire)["rollout"]["bf16_first_layers"] == 1
    assert load_flow(wire).train.bf16_first_layers == 1


def test_vllms_command_line_parser_gets_the_flow(tmp_path):
    """Through VeRL's own conversion: a dict becomes one JSON argument."""
    from verl.workers.rollout.vllm_rollout.utils import build_cli_args_from_config

    cfg = composed(tmp_path, "flow.train.exclude=['*.q_proj']")
    engine = OmegaConf.to_container(rollout_of(cfg).engine_kwargs.vllm, resolve=True)
    args = build_cli_args_from_config(engine)
    value = args[args.index("--additional_config") + 1]
    assert load_flow(json.loads(value)["jetrl_flow"]).rollout.exclude == ("*.q_proj",)
    assert args[args.index("--quantization") + 1] == "jetrl"


def test_a_users_own_external_lib_stays(tmp_path):
    cfg = composed(tmp_path, "actor_rollout_ref.model.external_lib=mine")
    assert list(cfg.actor_rollout_ref.model.external_lib) == ["mine", "jetrl.integrations.verl"]


def test_the_file_logger_cannot_be_lost(tmp_path):
    assert list(composed(tmp_path, "trainer.logger=[console]").trainer.logger) == ["console", "file"]


def test_token_level_truncated_importance_sampling_is_one_key(tmp_path):
    assert composed(tmp_path, "algorithm=dapo").algorithm.rollout_correction.rollout_is is None
    for algorithm in options("algorithm"):
        cfg = composed(tmp_path, f"algorithm={algorithm}", "algorithm.rollout_correction.rollout_is=token")
        assert cfg.algorithm.rollout_correction.rollout_is == "token"


def test_resume_becomes_verls_keys(tmp_path):
    for mode in ("auto", "disable"):
        assert composed(tmp_path, f"resume={mode}").trainer.resume_mode == mode
    folder = tmp_path / "global_step_3"
    folder.mkdir()
    cfg = composed(tmp_path, f"resume={folder}")
    assert (cfg.trainer.resume_mode, cfg.trainer.resume_from_path) == ("resume_path", str(folder))


def test_own_data_files_switch_the_task_off(tmp_path):
    assert composed(tmp_path).prepare_data
    cfg = composed(tmp_path, "data.train_files=a.parquet", "data.val_files=b.parquet")
    assert not cfg.prepare_data and cfg.data.train_files == "a.parquet"
    with pytest.raises(UserError, match=r"data\.val_files is not set"):
        composed(tmp_path, "data.train_files=a.parquet")


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("actor_rollout_ref.actor.optim.lrr=1", ["did you mean actor_rollout_ref.actor.optim.lr?"]),
        ("+run.foo=1", ["run.foo is not a key of run; allowed: name, dir"]),
        ("run.name=a/b", ["run.name=a/b"]),
        ("resume=maybe", ["resume=maybe", "auto, disable"]),
        ("resume=/nowhere/global_step_3", ["is not a folder"]),
        ("flow.train.exclud=[a]", ["did you mean flow.train.exclude?"]),
        ("flow.train.linear=fp4", ["fp4", "bf16, fp8"]),
        ("flow.train.bf16_first_layers=-1", ["bf16_first_layers=-1"]),
        ("trainer.total_epochs=x", ["trainer.total_epochs=x must be a whole number"]),
        ("trainer.total_epochs=1,2", ["trainer.total_epochs=1,2", "add -m"]),
        ("trainer.total_epochs=${nope}", ["trainer.total_epochs", "nope"]),
        ("a.b=[1", ["a.b=[1 is not an override"]),
        ("trainer.logger.x.y=1", ["trainer.logger.x.y=1"]),
        ("~trainer.foo", ["~trainer.foo"]),
        ("+trainer.total_epochs=1", ["+trainer.total_epochs=1"]),
        ("precision=fp4", ["precision=fp4 is unknown", "allowed: auto, bf16, fp8_rollout"]),
        ("+foo.bar=1", ["+foo.bar=1: foo is not a key, and nothing would read it"]),
        ("+trainr.nnodes=1", ["trainr is not a key (did you mean trainer?)"]),
        ("model=tinny", ["did you mean tiny?"]),
        ("data=nope", ["allowed: arithmetic"]),
        ("algorithm=ppo", ["allowed: dapo, grpo"]),
        ("hardware=tpu", ["allowed: 1gpu, 8gpu, cpu"]),
        ("actor_rollout_ref.model.path=/nowhere", ["actor_rollout_ref.model.path=/nowhere does not exist"]),
    ],
)
def test_a_mistake_is_one_sentence_and_writes_nothing(tmp_path, monkeypatch, capsys, word, parts):
    monkeypatch.chdir(tmp_path)
    assert train.main([*words(tmp_path, word), "--cfg", "job"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "Traceback" not in err
    for part in parts:
        assert part in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_cfg_job_prints_a_whole_configuration(tmp_path, capsys):
    assert train.main([*words(tmp_path), "--cfg", "job"]) == 0
    cfg = OmegaConf.create(capsys.readouterr().out)
    assert cfg.trainer.default_local_dir == f"{tmp_path}/run/checkpoints" and "hydra" not in cfg


def optimizer_of(cfg) -> tuple[str, str]:
    optim = cfg.actor_rollout_ref.actor.optim
    return optim.optimizer_impl, optim.optimizer


@pytest.mark.parametrize("flow", ["bf16", "fp8_rollout", "unified_fp8"])
def test_every_flow_gets_the_same_masters_and_one_key_changes_them(tmp_path, flow):
    cfg = composed(tmp_path, f"precision={flow}")
    assert cfg.actor_rollout_ref.actor.fsdp_config.model_dtype == "bf16"
    assert cfg.actor_rollout_ref.ref.fsdp_config.model_dtype == "bf16"
    assert optimizer_of(cfg) == ("jetrl.optimizer", "StochasticAdamW")
    cfg = composed(tmp_path, f"precision={flow}", "masters=fp32")
    assert cfg.actor_rollout_ref.actor.fsdp_config.model_dtype == "fp32"
    assert optimizer_of(cfg) == ("torch.optim", "AdamW")


def test_the_users_own_optimizer_stays(tmp_path):
    own = (
        "actor_rollout_ref.actor.optim.optimizer_impl=torchao.optim",
        "actor_rollout_ref.actor.optim.optimizer=AdamW8bit",
    )
    assert optimizer_of(composed(tmp_path, *own)) == ("torchao.optim", "AdamW8bit")


def test_the_wire_reaches_the_trainer(tmp_path):
    assert composed(tmp_path).actor_rollout_ref.model.override_config.jetrl_wire == "fp8"
    assert composed(tmp_path, "wire=bf16").actor_rollout_ref.model.override_config.jetrl_wire == "bf16"


def test_the_gemm_backend_reaches_both_sides_of_an_fp8_flow(tmp_path):
    ours = composed(tmp_path, "gemm=triton").actor_rollout_ref
    assert ours.model.override_config.jetrl_gemm == "triton"
    assert ours.rollout.engine_kwargs.vllm.additional_config.jetrl_gemm == "triton"
    stock = composed(tmp_path, "precision=bf16", "gemm=triton").actor_rollout_ref.rollout.engine_kwargs.vllm
    assert "jetrl_gemm" not in stock.additional_config


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("gemm=cutlass", ["jetrl_gemm=cutlass", "allowed: auto, deepgemm, cublaslt, triton"]),
        ("masters=fp16", ["masters=fp16", "allowed: bf16, fp32"]),
        ("wire=int8", ["jetrl_wire=int8", "allowed: fp8, bf16"]),
        ("actor_rollout_ref.actor.fsdp_config.model_dtype=fp32", ["give masters=bf16 or fp32 instead"]),
        ("+actor_rollout_ref.model.override_config.jetrl_wire=bf16", ["give wire=fp8 or bf16 instead"]),
    ],
)
def test_masters_wire_and_gemm_are_checked(tmp_path, word, parts):
    with pytest.raises(UserError) as e:
        composed(tmp_path, word)
    assert all(part in str(e.value) for part in parts)
