"""One thing that keeps a rollout from being a subgraph of training."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """operator, operand, what each side has there, and the configuration key that would fix it.

    Where the two sides agree but the layout of one is broken, `rollout` describes it and `training` is the rule.
    """

    operator: str
    tensor: str
    rollout: str
    training: str
    key: str
    advice: str

    def __str__(self) -> str:
        return (
            f"{self.operator}: {self.tensor} is {self.rollout} in the rollout and {self.training} in training; "
            f"{self.key}: {self.advice}"
        )

    def to_dict(self) -> dict:
        return {
            "operator": self.operator,
            "tensor": self.tensor,
            "rollout": self.rollout,
            "training": self.training,
            "key": self.key,
            "advice": self.advice,
            "sentence": str(self),
        }


SHOWN = 3


def violation_sentence(flow_name: str, violations: list[Violation]) -> str:
    """What ends a job whose flow claims to be unified and is not: the first few edges, each with the key that fixes it."""
    shown = "; ".join(str(v) for v in violations[:SHOWN])
    more = f" (and {len(violations) - SHOWN} more)" if len(violations) > SHOWN else ""
    return (
        f"flow {flow_name} claims to be unified, but the rollout's precision graph is not a subgraph of the trainer's "
        f"forward graph: {shown}{more}"
    )
