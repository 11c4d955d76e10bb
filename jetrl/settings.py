"""jetrl's own keys of an existing VeRL job: `actor_rollout_ref.model.override_config.jetrl_*`, checked by dataclass."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from jetrl.errors import UserError

PREFIX = "jetrl_"
WIRES = ("fp8", "bf16")
WEIGHT_CACHES = ("auto", "step", "micro_batch")
# Read elsewhere: the flow by jetrl.precision.flow, the clip's settings where the policy loss is registered.
OTHERS = ("flow", "calibrated_clip")


@dataclass(frozen=True)
class EngineSettings:
    """wire: what a weight sync sends where both sides quantize alike, FP8 codes and scales or the master weights.
    weight_cache: when the trainer's FP8 copies of the weights are kept (jetrl.weight_cache).
    """

    wire: str = "fp8"
    weight_cache: str = "auto"

    def __post_init__(self) -> None:
        for name, allowed in (("wire", WIRES), ("weight_cache", WEIGHT_CACHES)):
            value = getattr(self, name)
            if value not in allowed:
                raise UserError(
                    f"actor_rollout_ref.model.override_config.{PREFIX}{name}={value} is unknown; "
                    f"allowed: {', '.join(allowed)}"
                )


def engine_settings(override_config: Mapping) -> EngineSettings:
    """From VeRL's override_config. Raises UserError for an unknown `jetrl_` key: VeRL would set it and nobody read it."""
    own = {key.removeprefix(PREFIX): value for key, value in override_config.items() if key.startswith(PREFIX)}
    names = [f.name for f in fields(EngineSettings)]
    for name in own:
        if name not in (*names, *OTHERS):
            allowed = ", ".join(PREFIX + n for n in (*names, *OTHERS))
            raise UserError(
                f"actor_rollout_ref.model.override_config.{PREFIX}{name} is not a key of jetrl; allowed: {allowed}"
            )
    return EngineSettings(**{name: own[name] for name in names if name in own})
