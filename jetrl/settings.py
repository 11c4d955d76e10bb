"""jetrl's own keys of an existing VeRL job, checked by dataclass: `actor_rollout_ref.model.override_config.jetrl_*` of the
trainer and `actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.jetrl_*` of the rollout."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from jetrl.errors import UserError

PREFIX = "jetrl_"
WIRES = ("fp8", "bf16")
WEIGHT_CACHES = ("auto", "step", "micro_batch")
# auto, and jetrl_kernels.backends.GEMM_BACKENDS, which a test compares: reading them there would import torch.
GEMMS = ("auto", "deepgemm", "cublaslt", "triton")
# Read elsewhere: the flow by jetrl.precision.flow, the clip's settings where the policy loss is registered.
OTHERS = ("flow", "calibrated_clip")


@dataclass(frozen=True)
class EngineSettings:
    """wire: what a weight sync sends where both sides quantize alike, FP8 codes and scales or the master weights.
    weight_cache: when the trainer's FP8 copies of the weights are kept (jetrl.weight_cache).
    gemm: who multiplies FP8 matrices on a GPU (jetrl_kernels.backends); auto takes the fastest that is installed.
    """

    wire: str = "fp8"
    weight_cache: str = "auto"
    gemm: str = "auto"

    def __post_init__(self) -> None:
        for name, allowed in (("wire", WIRES), ("weight_cache", WEIGHT_CACHES), ("gemm", GEMMS)):
            _check_choice(f"actor_rollout_ref.model.override_config.{PREFIX}{name}", getattr(self, name), allowed)


def engine_settings(override_config: Mapping) -> EngineSettings:
    """From VeRL's override_config. Raises UserError for an unknown `jetrl_` key: VeRL would set it and nobody read it."""
    names = [f.name for f in fields(EngineSettings)]
    own = _own_keys(override_config, "actor_rollout_ref.model.override_config", (*names, *OTHERS))
    return EngineSettings(**{name: own[name] for name in names if name in own})


def rollout_gemm(additional_config: Mapping) -> str:
    """The rollout's `jetrl_gemm`, from vLLM's additional_config. Raises UserError for an unknown value or `jetrl_` key."""
    where = "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config"
    gemm = _own_keys(additional_config, where, ("flow", "gemm")).get("gemm", EngineSettings.gemm)
    _check_choice(f"{where}.{PREFIX}gemm", gemm, GEMMS)
    return gemm


def _own_keys(node: Mapping, where: str, allowed: tuple[str, ...]) -> dict:
    own = {key.removeprefix(PREFIX): value for key, value in node.items() if key.startswith(PREFIX)}
    for name in own:
        if name not in allowed:
            listed = ", ".join(PREFIX + n for n in allowed)
            raise UserError(f"{where}.{PREFIX}{name} is not a key of jetrl; allowed: {listed}")
    return own


def _check_choice(key: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{key}={value} is unknown; allowed: {', '.join(allowed)}")
