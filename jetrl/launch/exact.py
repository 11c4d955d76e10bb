"""Where an exact flow cannot hold: the operator that would differ and the key to change, before anything starts."""

import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from jetrl.data.models import PACKAGED, resolve_model_path
from jetrl.errors import UserError
from jetrl.launch.model_files import check_sizes, read_config
from jetrl.precision.kernels import EXACT_HEADS

_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"
_ENGINE = f"{_ROLLOUT}.engine_kwargs.vllm"

# (operator, key, values that keep its bits, what another value does, what to set). None stands for a key that is not there.
_RULES = (
    ("o_proj and down_proj", f"{_ROLLOUT}.tensor_model_parallel_size", (None, 1), "adds shards in another order", "1"),
    ("log_softmax", f"{_ROLLOUT}.top_p", (None, 1, 1.0), "samples from a cut distribution", "1.0"),
    ("log_softmax", f"{_ROLLOUT}.top_k", (None, -1, 0), "samples from a cut distribution", "-1"),
    ("log_softmax", f"{_ROLLOUT}.min_p", (None, 0, 0.0), "samples from a cut distribution", "0"),
    ("log_softmax", f"{_ROLLOUT}.repetition_penalty", (None, 1, 1.0), "changes the logits", "1.0"),
    ("log_softmax", f"{_ROLLOUT}.presence_penalty", (None, 0, 0.0), "changes the logits", "0"),
    ("log_softmax", f"{_ROLLOUT}.frequency_penalty", (None, 0, 0.0), "changes the logits", "0"),
    ("log_softmax", f"{_ROLLOUT}.calculate_log_probs", (True,), "gives no log-probabilities to compare", "true"),
    ("log_softmax", f"{_ROLLOUT}.logprobs_mode", (None, "processed_logprobs"), "reports other logits", "processed_logprobs"),
    ("log_softmax", f"{_MODEL}.use_fused_kernels", (None, False), "computes it in the trainer's lm_head kernel", "false"),
    ("every operator", f"{_MODEL}.use_liger", (None, False), "replaces the trainer's kernels", "false"),
    ("attention", f"{_MODEL}.use_remove_padding", (None, True), "pads sequences", "true"),
    ("attention", f"{_MODEL}.override_config.attn_implementation", (None, "jetrl_fa3", "jetrl_rows"), "is another kernel", "null"),
    ("attention", f"{_ENGINE}.kv_cache_dtype", (None, "auto", "bfloat16"), "rounds keys and values", "auto"),
    ("attention", f"{_ENGINE}.attention_backend", (None, "FLASH_ATTN", "CPU_ATTN"), "is another kernel", "null"),
    ("attention", f"{_ENGINE}.attention_config", (None,), "may choose another kernel", "null"),
    ("every operator", f"{_ENGINE}.speculative_config", (None,), "checks drafts in another batch form", "null"),
    ("every operator", f"{_ROLLOUT}.dtype", ("bfloat16", "bf16", "auto"), "is another carrier", "bfloat16"),
)  # fmt: skip
_PER_ROLE = (
    ("attention", "ulysses_sequence_parallel_size", (None, 1), "divides the heads over GPUs", "1"),
    ("every operator", "fsdp_config.mixed_precision.param_dtype", (None, "bf16", "bfloat16"), "is another carrier", "bf16"),
)  # fmt: skip


def obstacle(cfg: DictConfig) -> str | None:
    """What in a composed VeRL configuration stands against equal bits, as the end of a sentence; None for nothing."""
    rules = list(_RULES)
    for role in ("actor", "ref"):
        rules += [(op, f"actor_rollout_ref.{role}.{key}", *rest) for op, key, *rest in _PER_ROLE]
        rules += [
            (op, f"actor_rollout_ref.{role}.fsdp_config.{key}", *rest) for op, key, *rest in _PER_ROLE if "." not in key
        ]
    for operator, key, allowed, effect, fix in rules:
        value = OmegaConf.select(cfg, key)
        if value not in allowed:
            return f"{operator}: {key}={value} {effect}; set it to {fix}"
    return None


def machine_obstacle(cfg: DictConfig) -> str | None:
    """What this machine lacks, where the job runs on it alone (other nodes answer when their workers start)."""
    if cfg.trainer.nnodes != 1 or cfg.trainer.device == "cpu":
        return None
    from jetrl.attention.choice import fa3_obstacle  # torch, and with a GPU vLLM

    found = fa3_obstacle()
    return None if found is None else f"attention: it needs vLLM's FA3 in both engines, and {found}"


def check(cfg: DictConfig, flow_name: str) -> None:
    """Refuse an exact flow that this configuration breaks. Raises UserError."""
    found = obstacle(cfg)
    if found:
        raise UserError(f"precision={flow_name} cannot have equal bits in {found}, or use precision=unified_fp8")


def heads_obstacle(cfg: DictConfig, hf_config: dict) -> str | None:
    """Heads for which FA3's bits were seen to differ between decode and prefill, or were not looked at.

    hf_config: the keys of the model's config.json.
    """
    size = hf_config.get("head_dim") or hf_config["hidden_size"] // hf_config["num_attention_heads"]
    if cfg.trainer.device == "cpu" or size in EXACT_HEADS:
        return None
    shown = ", ".join(map(str, EXACT_HEADS))
    return f"attention: FA3 was shown to for heads of {shown}, and this model's have {size}"


def check_heads(cfg: DictConfig, flow_name: str, hf_config: dict) -> None:
    """Refuse a model with such heads. Raises UserError."""
    found = heads_obstacle(cfg, hf_config)
    if found:
        raise UserError(f"precision={flow_name} cannot have equal bits in {found}; use precision=unified_fp8")


def check_machine(cfg: DictConfig, flow_name: str) -> None:
    """Refuse an exact flow that this machine cannot run. Raises UserError."""
    found = machine_obstacle(cfg)
    if found:
        raise UserError(f"precision={flow_name} cannot have equal bits in {found}; use precision=unified_fp8")


AUTO = "auto"
# There it is a means of testing: attention adds in a written order, one elementwise operation after another.
SLOW_ON_CPU = "reasonable time on a CPU"
EXACT, OTHERWISE = "unified_exact", "unified_fp8"


def _model_obstacle(cfg: DictConfig) -> str | None:
    """`heads_obstacle` of the job's model, where its sizes are known without fetching anything; preflight reads the rest."""
    from jetrl.precision.architectures import bundled, bundled_name

    path = str(cfg.actor_rollout_ref.model.path)
    if name := bundled_name(path):
        return heads_obstacle(cfg, bundled()[name]["config"])
    path = resolve_model_path(path) if path.startswith(PACKAGED) else path
    if not Path(path).expanduser().is_dir():
        return None
    config = read_config(path)
    check_sizes(config)
    return heads_obstacle(cfg, config)


def resolve_auto(cfg: DictConfig) -> str:
    """The flow for precision=auto, from the job composed with EXACT; says on stderr what was chosen and why."""
    found = (
        SLOW_ON_CPU if cfg.trainer.device == "cpu" else obstacle(cfg) or _model_obstacle(cfg) or machine_obstacle(cfg)
    )
    chosen = EXACT if found is None else OTHERWISE
    why = "every operator of the forward can have equal bits" if found is None else f"no equal bits in {found}"
    print(f"jetrl: precision=auto: {chosen} ({why})", file=sys.stderr, flush=True)
    return chosen
