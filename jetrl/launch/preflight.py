"""Every refusal before Ray starts. Nothing is written here.

`check(cfg)` is what jetrl.train runs; `check_verl_config(cfg)` is its part that needs only VeRL's own keys, so that it can
judge an existing VeRL job's configuration as well. Each raises UserError with one sentence: value, what is allowed, the key that fixes it.
"""

import contextlib
import io
import os
import shutil
import warnings
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from jetrl.data import TaskConfig, check_columns
from jetrl.data.models import REMOTE
from jetrl.data.sources import local_files
from jetrl.errors import JobError, UserError
from jetrl.launch import batch_sizes, devices, exact, model_files, verl_schema
from jetrl.launch.checkpoints import why_not_whole
from jetrl.launch.config import run_config, steps_per_epoch
from jetrl.precision.flow import DEFAULT_FLOW, Flow, flow_from_dict, load_flow
from jetrl.precision.tensor_parallel import first_cut_block, sharded_linears, working_sizes
from jetrl.precision.violation import violation_sentence
from jetrl.settings import engine_settings, rollout_gemm
from jetrl.versions import check_versions

ENTRY_POINT = ("vllm.general_plugins", "jetrl", "jetrl.integrations.vllm:register")
# Logs, TensorBoard and data of a run, besides checkpoints.
RUN_FILES_BYTES = 200 * 2**20
# What one parameter takes in a checkpoint at most: FP32 master (BF16: two bytes less) and two FP32 Adam states.
CHECKPOINT_BYTES_PER_PARAMETER = 12
# jetrl keeps two; the third is the one being written.
CHECKPOINTS_AT_ONCE = 3


def check(cfg: DictConfig) -> None:
    """Refuse a composed jetrl job that cannot work. Raises UserError, JobError for a violated flow; writes nothing."""
    check_versions()
    check_verl_config(cfg)
    _check_masters(cfg)
    _check_trainer(cfg)
    _check_data(cfg)
    check_verl_accepts(cfg)
    devices.check_devices(cfg)
    devices.check_gemm(cfg)
    batch_sizes.check(cfg)
    _check_exact_machine(cfg)
    _check_output(cfg)
    _check_same_run(cfg)
    _check_resume_folder(cfg)
    _check_unified(cfg)


def check_verl_config(cfg: DictConfig) -> None:
    """Refuse what jetrl cannot do, from VeRL's keys alone."""
    flow = load_flow(OmegaConf.select(cfg, "actor_rollout_ref.model.override_config.jetrl_flow"))
    engine_settings(cfg.actor_rollout_ref.model.override_config)
    _check_engines(cfg)
    _check_unsupported(cfg)
    _check_quantization(cfg, flow)
    if flow.train.exact or flow.rollout.exact:
        exact.check(cfg, flow.name)
    _check_plugin(cfg, flow)
    _check_model(cfg, flow)


def _check_exact_machine(cfg: DictConfig) -> None:
    flow = load_flow(cfg.actor_rollout_ref.model.override_config.jetrl_flow)
    if flow.train.exact or flow.rollout.exact:
        exact.check_machine(cfg, flow.name)


def _check_unified(cfg: DictConfig) -> None:
    """A flow that claims to be unified has one assignment on both sides; the handshake would end the job minutes later.

    Raises JobError with the violated edges: this is jetrl.check's verdict, and has its exit code.
    """
    flow = flow_from_dict(OmegaConf.to_container(cfg.flow, resolve=True))
    if not flow.unified or flow.train == flow.rollout:
        return
    from jetrl.precision.check_job import check_job  # torch and transformers, which only this case needs
    from jetrl.precision.job import read_job

    violations = check_job(read_job(cfg)).violations
    if violations:
        raise JobError(violation_sentence(flow.name, violations))


def _check_masters(cfg: DictConfig) -> None:
    if cfg.actor_rollout_ref.actor.optim.optimizer_impl == "jetrl.optimizer" and find_spec("torchao") is None:
        raise UserError(
            "masters=bf16 rounds stochastically by torchao's optimizer, and torchao is not installed; run "
            "`pip install torchao==0.17.0`, or set masters=fp32"
        )


def _check_trainer(cfg: DictConfig) -> None:
    """What jetrl's own launcher needs of VeRL's trainer."""
    if not cfg.trainer.use_v1:
        raise UserError("trainer.use_v1=False is not supported: jetrl drives VeRL's V1 trainer; remove the override")
    if cfg.actor_rollout_ref.actor.checkpoint.async_save:
        raise UserError(
            "actor_rollout_ref.actor.checkpoint.async_save=True is not supported: a checkpoint could not be marked whole; "
            "set it to False"
        )
    sampler = [OmegaConf.select(cfg, f"trainer.v1.sampler.custom_sampler.{key}") for key in ("path", "name")]
    for key in ("algorithm.filter_groups.enable", "trainer.v1.sampler.sync_refill_failed_groups"):
        if all(sampler) and OmegaConf.select(cfg, key):
            raise UserError(
                f"{key}=True does nothing with trainer.v1.sampler.custom_sampler.name={sampler[1]}: VeRL gives a custom sampler "
                "no such setting; set trainer.v1.sampler.custom_sampler.path and name to null"
            )
    fixed = {
        "checkpoint_callback_class": "jetrl.launch.checkpoints.MarkWholeCallback",
        "max_actor_ckpt_to_keep": None,
        "max_critic_ckpt_to_keep": None,
    }
    for key, needed in fixed.items():
        if cfg.trainer[key] != needed:
            raise UserError(
                f"trainer.{key}={cfg.trainer[key]} is not supported: jetrl marks and keeps checkpoints itself; "
                "remove the override"
            )


def _check_engines(cfg: DictConfig) -> None:
    for role in ("actor", "ref"):
        key = f"actor_rollout_ref.{role}.strategy"
        strategy = OmegaConf.select(cfg, key)
        if strategy not in ("fsdp", "fsdp2"):
            raise UserError(f"{key}={strategy} is not supported by jetrl; allowed: fsdp, fsdp2")
    name = cfg.actor_rollout_ref.rollout.name
    if name != "vllm":
        raise UserError(f"actor_rollout_ref.rollout.name={name} is not supported by jetrl; allowed: vllm")
    mode = OmegaConf.select(cfg, "trainer.v1.trainer_mode")
    if mode not in (None, "sync"):
        raise UserError(f"trainer.v1.trainer_mode={mode} is not supported by jetrl (async trainer); allowed: sync")
    backend = OmegaConf.select(cfg, "actor_rollout_ref.rollout.checkpoint_engine.backend")
    if backend not in (None, "naive"):
        raise UserError(
            f"actor_rollout_ref.rollout.checkpoint_engine.backend={backend} is not supported by jetrl; allowed: naive"
        )


def _check_unsupported(cfg: DictConfig) -> None:
    for key in ("model.lora_rank", "model.lora.rank"):
        rank = OmegaConf.select(cfg, f"actor_rollout_ref.{key}")
        if rank:
            raise UserError(f"actor_rollout_ref.{key}={rank}: LoRA is not supported by jetrl; set it to 0")
    for key in ("model.lora_adapter_path", "model.lora.adapter_path"):
        path = OmegaConf.select(cfg, f"actor_rollout_ref.{key}")
        if path:
            raise UserError(f"actor_rollout_ref.{key}={path}: LoRA is not supported by jetrl; set it to null")
    for key in ("actor.qat.enable", "actor.fsdp_config.qat.enable", "ref.fsdp_config.qat.enable"):
        if OmegaConf.select(cfg, f"actor_rollout_ref.{key}"):
            raise UserError(f"actor_rollout_ref.{key}=True: VeRL's QAT is not supported by jetrl; set it to False")


def _check_quantization(cfg: DictConfig, flow: Flow) -> None:
    rollout = cfg.actor_rollout_ref.rollout
    engine = OmegaConf.select(rollout, "engine_kwargs.vllm") or OmegaConf.create({})
    if flow.rollout.linear != "vllm_fp8" and rollout.quantization is not None:
        raise UserError(
            f"actor_rollout_ref.rollout.quantization={rollout.quantization} is VeRL's own quantization and contradicts "
            f"the flow {flow.name}; remove it, or choose precision=fp8_vllm"
        )
    quantization = engine.get("quantization")
    wanted = "jetrl" if flow.rollout.linear == "fp8" else None
    if quantization != wanted:
        raise UserError(
            f"actor_rollout_ref.rollout.engine_kwargs.vllm.quantization={quantization} does not fit the flow "
            f"{flow.name}, which needs {'it unset' if wanted is None else wanted}; set "
            f"+actor_rollout_ref.rollout.engine_kwargs.vllm.quantization={'null' if wanted is None else wanted}"
        )
    rollout_gemm(engine.get("additional_config") or {})
    named = str(OmegaConf.select(engine, "additional_config.jetrl_flow") or DEFAULT_FLOW)
    if flow.rollout.linear == "fp8" and load_flow(named) != flow:
        raise UserError(
            f"the trainer has the flow {flow.name} (actor_rollout_ref.model.override_config.jetrl_flow) and vLLM has "
            f"{load_flow(named).name} (actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.jetrl_flow); "
            "give both the same"
        )
    cache = engine.get("kv_cache_dtype") or "auto"
    if flow.unified and str(cache).startswith("fp8"):
        raise UserError(
            f"actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype={cache} is not supported with the unified "
            f"flow {flow.name}: the trainer has no FP8 KV cache; allowed: auto"
        )


def _check_plugin(cfg: DictConfig, flow: Flow) -> None:
    if flow.rollout.linear != "fp8":
        return
    group, name, _ = ENTRY_POINT
    if name not in {entry.name for entry in metadata.entry_points(group=group)}:
        raise UserError(
            f"precision={flow.name} needs jetrl's vLLM plug-in, and no installed package has the entry point "
            f"{name} in {group}; run `pip install --no-deps jetrl` (in a checkout: pip install --no-deps -e .)"
        )
    allowed = OmegaConf.select(cfg, "ray_kwargs.ray_init.runtime_env.env_vars.VLLM_PLUGINS")
    allowed = os.environ.get("VLLM_PLUGINS") if allowed is None else str(allowed)
    if allowed is not None and name not in [part.strip() for part in allowed.split(",")]:
        raise UserError(
            f"VLLM_PLUGINS={allowed!r} disables jetrl's vLLM plug-in, which precision={flow.name} needs; "
            f"unset VLLM_PLUGINS or add {name} to it"
        )


def _check_model(cfg: DictConfig, flow: Flow) -> None:
    model = cfg.actor_rollout_ref.model
    if str(model.path).startswith(REMOTE):
        return  # VeRL copies it to the node when the job runs; nothing can be read before
    hf_config = model_files.read_config(str(model.path))
    architecture = ", ".join(_names(hf_config.get("architectures") or hf_config.get("model_type")))
    where = f"actor_rollout_ref.model.path={model.path}"
    experts = next((k for k in model_files.EXPERT_KEYS if hf_config.get(k)), None)
    if experts:
        raise UserError(
            f"{where}: {architecture} has MoE experts ({experts}={hf_config[experts]}), which jetrl does not support; "
            "choose a dense model"
        )
    if any(key in hf_config for key in model_files.VISION_KEYS):
        raise UserError(
            f"{where}: {architecture} has a vision tower, which jetrl does not support; choose a text model"
        )
    if hf_config.get("quantization_config"):
        quantization = hf_config["quantization_config"]
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise UserError(
            f"{where} is already quantized ({method}); jetrl quantizes from BF16 weights: give the BF16 checkpoint"
        )
    _check_attention(model, where)
    model_files.check_sizes(hf_config)
    if flow.train.exact or flow.rollout.exact:
        exact.check_heads(cfg, flow.name, hf_config)
    _check_tensor_parallel(cfg, flow, hf_config)


def _names(value: object) -> list[str]:
    return [str(name) for name in value] if isinstance(value, list) else [str(value)]


def _check_attention(model: DictConfig, where: str) -> None:
    attention = model.override_config.get("attn_implementation")  # unset: the engine chooses one that runs
    if attention == "flash_attention_2" and find_spec("flash_attn") is None:
        raise UserError(
            f"{where} would use attention flash_attention_2, and flash-attn is not installed; install it, or remove "
            "actor_rollout_ref.model.override_config.attn_implementation, so that jetrl chooses (or set it to sdpa)"
        )


def _check_tensor_parallel(cfg: DictConfig, flow: Flow, hf_config: dict) -> None:
    key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    tp = OmegaConf.select(cfg, key)
    gpus = cfg.trainer.n_gpus_per_node * cfg.trainer.nnodes
    if not isinstance(tp, int) or tp < 1 or gpus % tp:
        raise UserError(
            f"{key}={tp} does not divide the {gpus} GPUs of the job (trainer.n_gpus_per_node x trainer.nnodes)"
        )
    if flow.rollout.linear != "fp8":
        return
    linears = sharded_linears(hf_config)
    names = model_files.fp8_names(hf_config, flow.rollout, "rollout")
    model_files.fp8_names(hf_config, flow.train, "train")  # refuses patterns that match nothing
    cut = first_cut_block(linears, tp, lambda name: name in names)
    if cut is not None:
        fitting = [n for n in working_sizes(linears, max(gpus, 8), lambda name: name in names) if gpus % n == 0]
        raise UserError(
            f"{key}={tp} cuts a 128x128 block of *.{cut.name}: its {cut.size} elements would be split into "
            f"{'parts of ' + str(cut.shard(tp)) if cut.shard(tp) else 'unequal parts'}; "
            f"sizes that work on {gpus} GPUs: {', '.join(map(str, fitting))}"
        )


def _check_data(cfg: DictConfig) -> None:
    if cfg.prepare_data:
        if not isinstance(cfg.get("task"), DictConfig):
            raise UserError(
                "the task node is missing; choose a task with data=<name>, or give data.train_files and val_files"
            )
        task = TaskConfig.from_dict(OmegaConf.to_container(cfg.task, resolve=True))
        local_files(task)  # refuses a task.path without them
        if task.train_size is not None:
            steps_per_epoch(cfg, task.train_size)
        return
    rows = {}
    for key in ("train_files", "val_files"):
        value = cfg.data[key]
        names = list(value) if isinstance(value, ListConfig) else [value]
        if not names:
            raise UserError(f"data.{key}=[] is empty; give at least one file")
        rows[key] = sum(check_columns(str(name), cfg.data.prompt_key) for name in names)
    steps_per_epoch(cfg, rows["train_files"])


def check_verl_accepts(cfg: DictConfig) -> None:
    """Keys and types of every VeRL node that a dataclass describes, then VeRL's own validation.

    VeRL builds most of these inside Ray workers, where a wrong key is a traceback minutes into the job.
    """
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    verl_schema.check(cfg)
    try:
        # It prints that all is well, and warns that there is no critic.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            validate_config(cfg, use_reference_policy=need_reference_policy(cfg), use_critic=need_critic(cfg))
    except (AssertionError, ValueError, TypeError, OmegaConfBaseException, HydraException) as e:
        reason = e.__cause__ or e  # Hydra wraps what a dataclass's own check raised
        raise UserError(f"VeRL refuses the configuration: {' '.join(str(reason).split())}") from e


def _check_output(cfg: DictConfig) -> None:
    """The run's folder can be made and written, and there is room for what the job will write."""
    run = run_config(cfg)
    place = run.folder
    while not os.path.exists(place):  # unlike Path.exists, False below a folder that may not be entered
        place = place.parent
    if not place.is_dir():
        raise UserError(f"run.dir={run.dir} cannot be made: {place} is not a folder; choose another run.dir")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"run.dir={run.dir} is not writable ({place} refuses); choose another run.dir")
    needed = RUN_FILES_BYTES
    remote = str(cfg.actor_rollout_ref.model.path).startswith(REMOTE)  # its size is not known yet
    if cfg.trainer.save_freq > 0 and not remote:
        parameters = model_files.parameter_count(str(cfg.actor_rollout_ref.model.path))
        needed += CHECKPOINTS_AT_ONCE * CHECKPOINT_BYTES_PER_PARAMETER * parameters
    free = shutil.disk_usage(place).free
    if free < needed:
        raise UserError(
            f"run.dir={run.dir} has {free / 2**30:.1f} GiB free and the job needs about {needed / 2**30:.1f} GiB; "
            "free some, choose another run.dir, or set trainer.save_freq=-1 (no checkpoints)"
        )


def _check_same_run(cfg: DictConfig) -> None:
    """resume=auto must not go on with another model's or another flow's checkpoint that has the same run name."""
    run = run_config(cfg)
    earlier = run.folder / "config.yaml"
    if cfg.trainer.resume_mode != "auto" or not earlier.is_file():
        return
    if not any((run.folder / "checkpoints").glob("global_step_*")):
        return
    try:
        before = OmegaConf.load(earlier)
    except (YAMLError, ValueError, OmegaConfBaseException) as e:
        raise UserError(f"{earlier} is damaged; choose another run.name, or start over with resume=disable") from e
    for what, key in (
        ("model", "actor_rollout_ref.model.path"),
        ("flow", "actor_rollout_ref.model.override_config.jetrl_flow"),
        ("masters", "actor_rollout_ref.actor.fsdp_config.model_dtype"),
    ):
        old, new = OmegaConf.select(before, key), OmegaConf.select(cfg, key)
        if old != new:
            raise UserError(
                f"{run.dir} holds a run with the {what} {old}, and this one has {new}; choose another run.name, or start "
                "over with resume=disable"
            )


def _check_resume_folder(cfg: DictConfig) -> None:
    """A folder that was cut off in a save would be a traceback inside the workers."""
    folder = cfg.trainer.resume_from_path
    reason = why_not_whole(Path(folder)) if folder else None
    if reason:
        raise UserError(
            f"resume={folder} is not a whole checkpoint ({reason}); give one that is, or resume=auto for the newest of them"
        )
