"""Which linear layers a flow quantizes: anchored name patterns, first and last layers, and what always stays BF16."""

import difflib
import fnmatch

from jetrl.errors import UserError
from jetrl.precision.flow import PrecisionAssignment


def layer_index(name: str) -> int | None:
    """Number of the decoder layer a canonical name lies in: its first numeric component; None outside the layers."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def match(pattern: str, names: list[str], key: str) -> list[str]:
    """The names that `pattern` matches as a whole (`*` also crosses dots; case counts), in the given order.

    Raises UserError, with the nearest names, when it matches nothing: a pattern that quietly excludes nothing is how a
    layer ends up in the wrong precision.
    """
    found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if not found:
        near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
        raise UserError(
            f"{key}: the pattern {pattern!r} matches none of the model's {len(names)} linear layers; patterns are "
            f"anchored over full names, the nearest are {', '.join(near)}"
        )
    return found


def kept_unquantized(
    names: list[str], assignment: PrecisionAssignment, num_layers: int, always: dict[str, str], side: str = "train"
) -> dict[str, str]:
    """name -> why it stays unquantized, for every name in `names` that does, under `assignment`.

    names: canonical linear names; always: names that are never quantized, with the reason (lm_head, router).
    side: "train" or "rollout", for error messages. Raises UserError for a pattern without a match or a layer count
    beyond the model's.
    """
    reasons: dict[str, str] = {}
    for pattern in assignment.exclude:
        for name in match(pattern, names, f"flow.{side}.exclude"):
            reasons.setdefault(name, f"flow.{side}.exclude={pattern}")
    first, last = assignment.bf16_first_layers, assignment.bf16_last_layers
    if first + last > num_layers:
        raise UserError(
            f"flow.{side}.bf16_first_layers={first} and flow.{side}.bf16_last_layers={last} exceed the model's "
            f"{num_layers} decoder layers; their sum must be at most {num_layers}"
        )
    for name in names:
        index = layer_index(name)
        if index is not None and index < first:
            reasons.setdefault(name, f"flow.{side}.bf16_first_layers={first}")
        if index is not None and index >= num_layers - last:
            reasons.setdefault(name, f"flow.{side}.bf16_last_layers={last}")
    if assignment.linear == "bf16":
        reasons.update({name: f"flow.{side}.linear=bf16" for name in names})
    for name, reason in always.items():
        reasons[name] = reason
    return reasons
