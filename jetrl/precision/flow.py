"""A flow: one precision assignment for training and one for rollout, under a name.

Flows live in configs/precision/*.yaml and nowhere else. jetrl.train composes them with Hydra; the plug-ins inside VeRL
and vLLM workers get a name, or a JSON object where the user changed a key (see `Flow.to_wire`).
"""

import json
from dataclasses import asdict, dataclass, field, fields
from importlib import resources

from omegaconf import OmegaConf

from jetrl.errors import UserError
from jetrl.precision.formats import WGRAD_KINDS

DEFAULT_FLOW = "unified_fp8"
LINEAR_KINDS = ("bf16", "fp8", "vllm_fp8")
SCALE_FORMATS = ("fp32", "pow2")


@dataclass(frozen=True)
class PrecisionAssignment:
    """What one engine does with its linear layers.

    linear: "bf16"; "fp8" (jetrl's layer); "vllm_fp8" (VeRL's own rollout.quantization=fp8, rollout only).
    exclude: anchored globs over canonical (Hugging Face) module names that stay BF16.
    bf16_first_layers, bf16_last_layers: decoder layers kept BF16 at either end.
    wgrad: how weight gradients get their operands (formats.WGRAD_KINDS); training only.
    exact: every operator of the forward is a kernel that both engines call and whose bits for one token do not depend on
    the batch (jetrl.precision.kernels), so that a token's log-probability has the same bits in both.
    """

    linear: str = "bf16"
    scale_format: str = "fp32"
    exclude: tuple[str, ...] = ()
    bf16_first_layers: int = 0
    bf16_last_layers: int = 0
    kv_cache: str = "bf16"
    wgrad: str = "requantize"
    exact: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.exclude, list | tuple) or not all(isinstance(p, str) and p for p in self.exclude):
            raise UserError(f"exclude={self.exclude} must be a list of name patterns, as in ['*.q_proj']")
        object.__setattr__(self, "exclude", tuple(self.exclude))
        _one_of("linear", self.linear, LINEAR_KINDS)
        _one_of("scale_format", self.scale_format, SCALE_FORMATS)
        _one_of("kv_cache", self.kv_cache, ("bf16",))
        _one_of("wgrad", self.wgrad, WGRAD_KINDS)
        _one_of("exact", self.exact, (True, False))
        for key in ("bf16_first_layers", "bf16_last_layers"):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise UserError(f"{key}={value} must be a whole number >= 0")
        if self.exact:
            self._check_exact()

    def _check_exact(self) -> None:
        """A BF16 linear goes to cuBLAS, merged in the rollout and apart in the trainer: nothing says that its bits agree."""
        wanted = {"linear": "fp8", "exclude": (), "bf16_first_layers": 0, "bf16_last_layers": 0}
        for key, value in wanted.items():
            if getattr(self, key) != value:
                shown = [] if value == () else value
                raise UserError(
                    f"exact=True needs {key}={shown}, not {getattr(self, key)}: a linear layer in BF16 has no kernel that "
                    f"both engines share; use precision=unified_fp8 to keep it in BF16"
                )


@dataclass(frozen=True)
class Flow:
    """A named pair of assignments. `unified` claims that rollout's graph is a subgraph of training's forward graph.

    shadow: what an extra forward of the trainer on a sampled micro-batch computes in (calibrated clipping); None: no such
    pass. BF16 only, because what it is held against is the stock model.
    """

    name: str
    unified: bool
    train: PrecisionAssignment = field(default_factory=PrecisionAssignment)
    rollout: PrecisionAssignment = field(default_factory=PrecisionAssignment)
    shadow: PrecisionAssignment | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise UserError(f"flow.name={self.name} must be a name")
        if not isinstance(self.unified, bool):
            raise UserError(f"flow.unified={self.unified} must be true or false")
        if self.train.linear == "vllm_fp8":
            raise UserError("flow.train.linear=vllm_fp8 is only defined for the rollout; allowed: bf16, fp8")
        if self.rollout.wgrad != PrecisionAssignment.wgrad:
            raise UserError(
                f"flow.rollout.wgrad={self.rollout.wgrad} is only defined for training: set flow.train.wgrad"
            )
        if self.shadow not in (None, PrecisionAssignment()):
            raise UserError(f"flow.shadow.linear={self.shadow.linear} is not supported; allowed: linear: bf16 alone")

    def to_dict(self) -> dict:
        return asdict(self)

    def to_wire(self) -> str:
        """The name where this is exactly the shipped flow, else a JSON object with every key."""
        if self.name in flow_names() and self == load_flow(self.name):
            return self.name
        return json.dumps(self.to_dict(), sort_keys=True)


def flow_names() -> list[str]:
    """Names of the shipped flows, sorted."""
    folder = resources.files("jetrl.configs") / "precision"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_flow(value: str | None) -> Flow:
    """A flow from its wire form: a shipped name, a JSON object, or None for the default.

    Raises UserError for an unknown name or key and for malformed JSON.
    """
    value = DEFAULT_FLOW if value is None else str(value)
    if value.lstrip().startswith("{"):
        try:
            return flow_from_dict(json.loads(value))
        except json.JSONDecodeError as e:
            raise UserError(f"the flow given as JSON does not parse: {e}; it was {value[:200]!r}") from e
    _one_of("precision", value, flow_names())
    text = (resources.files("jetrl.configs") / "precision" / f"{value}.yaml").read_text()
    return flow_from_dict(OmegaConf.to_container(OmegaConf.create(text), resolve=True)["flow"])


def flow_from_dict(data: dict) -> Flow:
    """Build and check a Flow from plain containers; unknown keys are refused by name."""
    _known_keys("flow", data, Flow)
    sides = {}
    for side in ("train", "rollout", "shadow"):
        if side == "shadow" and data.get(side) is None:
            continue
        assignment = data.get(side) or {}
        _known_keys(f"flow.{side}", assignment, PrecisionAssignment)
        try:
            sides[side] = PrecisionAssignment(**assignment)
        except UserError as e:
            raise UserError(f"flow.{side}.{e}") from e
    return Flow(name=data.get("name"), unified=data.get("unified"), **sides)


def _known_keys(where: str, data: dict, cls: type) -> None:
    allowed = [f.name for f in fields(cls)]
    for key in data:
        if key not in allowed:
            raise UserError(f"{where}.{key} is not a key of a flow; allowed: {', '.join(allowed)}")


def _one_of(key: str, value: object, allowed: tuple[str, ...] | list[str]) -> None:
    if value not in allowed:
        raise UserError(f"{key}={value} is unknown; allowed: {', '.join(map(str, allowed))}")
