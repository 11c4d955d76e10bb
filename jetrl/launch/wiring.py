"""What jetrl's own nodes mean in VeRL's keys: the flow on both sides, the run's folders, resuming."""

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from jetrl.errors import UserError
from jetrl.launch.config import RunConfig
from jetrl.precision.flow import Flow
from jetrl.settings import engine_settings

PLUGIN_MODULE = "jetrl.integrations.verl"
QUANTIZATION = "jetrl"
METRICS = "metrics.jsonl"
MASTERS = ("bf16", "fp32")


def apply_flow(cfg: DictConfig, flow: Flow) -> None:
    """Name the flow to the trainer (through the model's override_config) and to vLLM (through additional_config).

    Both get the same wire form, and each side checks the other's digest at the first weight sync.
    """
    wire = flow.to_wire()
    model, rollout = cfg.actor_rollout_ref.model, cfg.actor_rollout_ref.rollout
    with open_dict(cfg):
        model.external_lib = _with_plugin(model.external_lib)
        model.override_config.jetrl_flow = wire
        engine = _child(rollout.engine_kwargs, "vllm")
        additional = _child(engine, "additional_config")
        additional["jetrl_flow"] = wire
        if flow.rollout.linear == "fp8":
            if engine.get("quantization", QUANTIZATION) not in (None, QUANTIZATION):
                raise UserError(
                    f"actor_rollout_ref.rollout.engine_kwargs.vllm.quantization={engine.quantization} contradicts "
                    f"precision={flow.name}, which needs {QUANTIZATION}; remove one of the two"
                )
            engine.quantization = QUANTIZATION
        elif flow.rollout.linear == "vllm_fp8":
            rollout.quantization = "fp8"
        if flow.train.exact and cfg.trainer.device == "cpu":
            model.use_remove_padding = True  # hardware=cpu pads; the kernel with equal bits takes packed sequences
        if flow.rollout.exact and cfg.trainer.device != "cpu":
            # The sampler shares its log-softmax under this runner alone, and vLLM 0.24 chooses the older one for Qwen2.
            _child(cfg.ray_kwargs.ray_init.runtime_env, "env_vars").setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")


def apply_masters(cfg: DictConfig) -> None:
    """`masters`: what the optimizer owns, the same for every flow so that a comparison of flows compares nothing else.

    bf16: BF16 weights whose updates are rounded stochastically; an optimizer that the user named is kept. fp32: as VeRL
    ships it. The reference model never changes, so BF16 is exact for it: its forward sees bf16(weight) either way.
    """
    if cfg.masters not in MASTERS:
        raise UserError(f"masters={cfg.masters} is unknown; allowed: {', '.join(MASTERS)}")
    actor, ref = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.ref
    actor.fsdp_config.model_dtype = cfg.masters
    optim = actor.optim
    if cfg.masters == "bf16":
        ref.fsdp_config.model_dtype = "bf16"
        if (optim.optimizer_impl, optim.optimizer) == ("torch.optim", "AdamW"):
            optim.optimizer_impl, optim.optimizer = "jetrl.optimizer", "StochasticAdamW"


def apply_settings(cfg: DictConfig) -> None:
    """`wire` and `gemm`, under the names that an existing VeRL job gives them. Raises UserError for values that jetrl.settings refuses."""
    model, rollout = cfg.actor_rollout_ref.model, cfg.actor_rollout_ref.rollout
    with open_dict(cfg):
        model.override_config.jetrl_wire, model.override_config.jetrl_gemm = cfg.wire, cfg.gemm
        if rollout.engine_kwargs.vllm.get("quantization") == QUANTIZATION:
            rollout.engine_kwargs.vllm.additional_config.jetrl_gemm = cfg.gemm
    engine_settings(model.override_config)


def apply_lengths(cfg: DictConfig) -> None:
    """max_model_len where nobody set one: VeRL's default is the model's own limit, which sizes vLLM's cache for it."""
    if cfg.actor_rollout_ref.rollout.max_model_len is None:
        cfg.actor_rollout_ref.rollout.max_model_len = cfg.data.max_prompt_length + cfg.data.max_response_length


def apply_layout(cfg: DictConfig, run: RunConfig) -> None:
    """Put everything the run writes under run.dir."""
    folder = run.folder
    with open_dict(cfg):
        cfg.trainer.default_local_dir = str(folder / "checkpoints")
        cfg.trainer.logger = _with_file_logger(cfg.trainer.logger)
        env = _child(cfg.ray_kwargs.ray_init.runtime_env, "env_vars")
        # VeRL reads both from the environment of the process that logs, a Ray actor.
        env["VERL_FILE_LOGGER_PATH"] = str(run.folder / METRICS)
        env["TENSORBOARD_DIR"] = str(folder / "tensorboard")
        if cfg.data.train_files is None and cfg.data.val_files is None:
            cfg.data.train_files = str(folder / "data" / "train.parquet")
            cfg.data.val_files = str(folder / "data" / "val.parquet")
            cfg.prepare_data = True
        elif cfg.data.train_files is None or cfg.data.val_files is None:
            missing = "data.train_files" if cfg.data.train_files is None else "data.val_files"
            raise UserError(f"{missing} is not set; give both data.train_files and data.val_files, or neither")
        else:
            cfg.prepare_data = False


def apply_resume(cfg: DictConfig, choice: str) -> None:
    """choice: `auto`, `disable` or the path of a global_step_N folder."""
    by_path = choice not in ("auto", "disable")
    cfg.trainer.resume_mode = "resume_path" if by_path else choice
    cfg.trainer.resume_from_path = choice if by_path else None


def _child(node: DictConfig, key: str) -> DictConfig:
    """node[key], created empty where missing. DictConfig.setdefault returns its argument: what is set there is lost."""
    if node.get(key) is None:
        node[key] = {}
    return node[key]


def _with_plugin(value: object) -> object:
    """external_lib with jetrl's plug-in in it: the user's own modules stay."""
    if value is None:
        return PLUGIN_MODULE
    modules = list(OmegaConf.to_container(value)) if isinstance(value, ListConfig) else [value]
    if PLUGIN_MODULE not in modules:
        modules.append(PLUGIN_MODULE)
    return modules if len(modules) > 1 else modules[0]


def _with_file_logger(value: object) -> list[str]:
    backends = [value] if isinstance(value, str) else value or []
    if not isinstance(backends, list | ListConfig) or not all(isinstance(name, str) for name in backends):
        raise UserError(f"trainer.logger={value} must be a list of VeRL's loggers, as in [file,tensorboard]")
    backends = list(backends)
    return backends if "file" in backends else [*backends, "file"]
