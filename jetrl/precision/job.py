"""What a composed VeRL configuration says about precision: both sides' assignments, dtypes, sizes, tokens per step.

It reads VeRL's own keys, so it works for jobs that jetrl.train composed and for existing VeRL command lines alike.
"""

from dataclasses import dataclass

from omegaconf import DictConfig, ListConfig, OmegaConf

from jetrl.errors import UserError
from jetrl.precision.flow import PrecisionAssignment, load_flow
from jetrl.precision.formats import BF16, FP32, TensorFormat

PLUGIN = "jetrl.integrations.verl"
QUANTIZATION = "jetrl"
_DTYPES = {"bfloat16": BF16, "bf16": BF16, "auto": BF16, "float32": FP32, "fp32": FP32, "float": FP32}
_FP8_CACHE = TensorFormat("e4m3", "tensor", "fp32")


@dataclass(frozen=True)
class Job:
    """flow: name of the flow, or what runs without jetrl. unified: whether the job claims a unified flow.

    Tokens are per optimizer step; lengths in tokens; gpus over all nodes.
    """

    flow: str
    unified: bool
    train: PrecisionAssignment
    rollout: PrecisionAssignment
    model_path: str
    tensor_parallel: int
    train_carrier: TensorFormat
    rollout_carrier: TensorFormat
    rollout_kv: TensorFormat
    master: TensorFormat
    gpus: int
    samples: int
    prompt_tokens: int
    response_tokens: int
    micro_batch_tokens: int
    max_sequences: int
    checkpointing: bool
    device: str
    notes: tuple[str, ...] = ()

    @property
    def sequence_tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens

    @property
    def tokens_per_step(self) -> int:
        return self.samples * self.sequence_tokens

    @property
    def tokens_per_gpu(self) -> int:
        return max(1, self.tokens_per_step // self.gpus)


def read_job(cfg: DictConfig) -> Job:
    """cfg: a composed VeRL PPO configuration. Raises UserError for what cannot be described."""
    actor, rollout, model = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.model
    if actor.strategy not in ("fsdp", "fsdp2"):
        raise UserError(f"actor_rollout_ref.actor.strategy={actor.strategy} cannot be described; allowed: fsdp, fsdp2")
    if not isinstance(actor.fsdp_config, DictConfig):
        raise UserError(f"actor_rollout_ref.actor.fsdp_config={actor.fsdp_config} must be a group of keys")
    engine = OmegaConf.select(rollout, "engine_kwargs.vllm") or {}
    train, train_flow = _train_side(model)
    rollout_side, rollout_flow = _rollout_side(rollout, engine)
    notes = []
    if rollout_side.linear == "vllm_fp8":
        notes.append(
            "vLLM's own FP8 is described as on Hopper: scales rounded up to powers of two (VLLM_USE_DEEP_GEMM_E8M0)"
        )
    flow = train_flow or rollout_flow
    if flow is not None:
        name, unified = flow.name, flow.unified
        if flow.shadow is not None:
            notes.append(
                f"the trainer also runs a shadow pass, forward only, linears {flow.shadow.linear} (calibrated_clip)"
            )
        if train_flow is None or (rollout_flow is None and flow.rollout.linear == "fp8"):
            missing = f"external_lib={PLUGIN}" if train_flow is None else "engine_kwargs.vllm.quantization=jetrl"
            notes.append(f"only one of jetrl's two overrides is set; {missing} is missing")
        elif rollout_flow is not None and rollout_flow != train_flow:
            notes.append(f"the trainer is told flow {train_flow.name} and vLLM is told flow {rollout_flow.name}")
    else:
        name, unified = ("fp8_vllm", False) if rollout_side.linear == "vllm_fp8" else ("bf16", True)
        notes.append("this job does not use jetrl")
    if cfg.actor_rollout_ref.model.path is None:
        raise UserError("actor_rollout_ref.model.path is not set; give a model folder or a hub id")
    return Job(
        flow=name,
        unified=unified,
        train=train,
        rollout=rollout_side,
        model_path=str(model.path),
        tensor_parallel=int(rollout.tensor_model_parallel_size),
        train_carrier=_param_dtype(actor),
        rollout_carrier=_dtype("actor_rollout_ref.rollout.dtype", rollout.dtype),
        rollout_kv=_kv_format(engine, rollout),
        master=_dtype("actor_rollout_ref.actor.fsdp_config.model_dtype", actor.fsdp_config.model_dtype),
        gpus=max(1, int(cfg.trainer.nnodes) * int(cfg.trainer.n_gpus_per_node)),
        samples=int(cfg.data.train_batch_size) * int(rollout.n),
        prompt_tokens=int(cfg.data.max_prompt_length),
        response_tokens=int(cfg.data.max_response_length),
        micro_batch_tokens=micro_batch_tokens(cfg, "actor"),
        max_sequences=whole_number(cfg, "actor_rollout_ref.rollout.max_num_seqs"),
        checkpointing=bool(model.enable_gradient_checkpointing),
        device=str(cfg.trainer.device),
        notes=tuple(notes),
    )


def whole_number(cfg: DictConfig, *keys: str) -> int:
    """The first of the keys that has a value, which must be a whole number of at least 1."""
    key = next((key for key in keys if OmegaConf.select(cfg, key) is not None), keys[0])
    value = OmegaConf.select(cfg, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{key}={value} must be a whole number of at least 1")
    return value


def _train_side(model: DictConfig):
    libraries = model.external_lib
    libraries = list(libraries) if isinstance(libraries, ListConfig) else [libraries]
    if PLUGIN not in libraries:
        return PrecisionAssignment(), None
    flow = load_flow(OmegaConf.select(model, "override_config.jetrl_flow"))
    return flow.train, flow


def _rollout_side(rollout: DictConfig, engine: DictConfig | dict):
    name = engine.get("quantization")
    if name == QUANTIZATION:
        flow = load_flow((engine.get("additional_config") or {}).get("jetrl_flow"))
        return flow.rollout, flow
    if name is None and rollout.quantization is None:
        return PrecisionAssignment(), None
    if name is None and rollout.quantization == "fp8":
        return PrecisionAssignment(linear="vllm_fp8"), None
    if name is not None:
        raise UserError(
            f"actor_rollout_ref.rollout.engine_kwargs.vllm.quantization={name} cannot be described without running it; "
            f"allowed here: {QUANTIZATION}, or none with actor_rollout_ref.rollout.quantization=fp8"
        )
    raise UserError(
        f"actor_rollout_ref.rollout.quantization={rollout.quantization} cannot be described without running it; "
        "allowed here: fp8, or engine_kwargs.vllm.quantization=jetrl"
    )


def _param_dtype(actor: DictConfig) -> TensorFormat:
    """What FSDP casts parameters to and autocast computes in (VeRL 0.9.1: BF16 where mixed_precision is not given)."""
    key = "fsdp_config.mixed_precision.param_dtype"
    value = OmegaConf.select(actor, key) or "bf16"
    return _dtype(f"actor_rollout_ref.actor.{key}", value)


def _kv_format(engine: DictConfig | dict, rollout: DictConfig) -> TensorFormat:
    value = str(engine.get("kv_cache_dtype") or "auto")
    if value in ("fp8", "fp8_e4m3"):
        return _FP8_CACHE
    if value == "auto":
        return _dtype("actor_rollout_ref.rollout.dtype", rollout.dtype)
    return _dtype("actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype", value)


def _dtype(key: str, value: object) -> TensorFormat:
    if str(value) not in _DTYPES:
        raise UserError(f"{key}={value} is unknown here; allowed: {', '.join(sorted(_DTYPES))}")
    return _DTYPES[str(value)]


def micro_batch_tokens(cfg: DictConfig, role: str) -> int:
    """The most rows of one pass on one GPU. role: actor for forward and backward; rollout or ref for log-probs alone."""
    part, dynamic = ("ppo", "") if role == "actor" else ("log_prob", "log_prob_")
    key, group = f"actor_rollout_ref.{role}", cfg.actor_rollout_ref[role]
    sequence = int(cfg.data.max_prompt_length) + int(cfg.data.max_response_length)
    if group[f"{dynamic}use_dynamic_bsz"]:
        return whole_number(cfg, f"{key}.{part}_max_token_len_per_gpu")
    sizes = [f"{part}_micro_batch_size_per_gpu", f"{part}_micro_batch_size"]
    if all(group[size] is None for size in sizes):
        return sequence
    return whole_number(cfg, *(f"{key}.{size}" for size in sizes)) * sequence
