"""The `calibrated_clip` node: what it may hold, and how it reaches the trainer's workers."""

import json
from dataclasses import asdict, dataclass, fields

from omegaconf import DictConfig, OmegaConf, open_dict

from jetrl.errors import UserError

# The name in VeRL's policy-loss registry.
LOSS_MODE = "calibrated_clip"
# Attribute of the model's configuration, beside jetrl_flow, that carries the node to the workers.
WIRE_KEY = "jetrl_calibrated_clip"


@dataclass(frozen=True)
class CalibratedClip:
    """every: steps between two fits. sequences: how many of a rank's sequences each fit looks at."""

    every: int
    sequences: int

    def __post_init__(self) -> None:
        for key in ("every", "sequences"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"calibrated_clip.{key}={value} must be a whole number of at least 1")

    def to_wire(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_wire(cls, text: str) -> "CalibratedClip":
        return cls(**json.loads(text))


def calibration_of(cfg: DictConfig) -> CalibratedClip | None:
    """The checked node of a job's configuration; None where it is off. Raises UserError for a part without the others."""
    node = OmegaConf.select(cfg, "calibrated_clip")
    loss_mode = cfg.actor_rollout_ref.actor.policy_loss.loss_mode
    shadow = OmegaConf.select(cfg, "flow.shadow")
    if node is None:
        if loss_mode == LOSS_MODE:
            raise UserError(
                f"actor_rollout_ref.actor.policy_loss.loss_mode={LOSS_MODE} needs algorithm=grpo_calibrated"
            )
        return None
    if not isinstance(node, DictConfig):
        raise UserError(f"calibrated_clip={node} must have the keys every and sequences (algorithm=grpo_calibrated)")
    data = OmegaConf.to_container(node, resolve=True)
    allowed = [f.name for f in fields(CalibratedClip)]
    wrong = [key for key in data if key not in allowed] or [key for key in allowed if key not in data]
    if wrong:
        raise UserError(f"calibrated_clip.{wrong[0]} is unknown or missing; its keys are {', '.join(allowed)}")
    if loss_mode != LOSS_MODE:
        raise UserError(
            f"actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode} would ignore calibrated_clip; "
            f"set it to {LOSS_MODE} or choose algorithm=grpo"
        )
    if shadow is None:
        raise UserError("flow.shadow is missing; calibrated_clip needs it: set flow.shadow.linear=bf16")
    if OmegaConf.select(cfg, "algorithm.rollout_correction.bypass_mode"):
        raise UserError(
            "algorithm.rollout_correction.bypass_mode=True skips the pass that calibrated_clip samples from; set it to False"
        )
    return CalibratedClip(**data)


def apply_calibration(cfg: DictConfig) -> None:
    """Hand the node to the workers through the model's override_config, as the flow is."""
    settings = calibration_of(cfg)
    if settings is not None:
        with open_dict(cfg):
            cfg.actor_rollout_ref.model.override_config[WIRE_KEY] = settings.to_wire()
