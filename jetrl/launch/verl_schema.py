"""Keys and plain types of VeRL's configuration, from the dataclasses that its `_target_` keys name."""

import dataclasses
import types
import typing
from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from jetrl.errors import UserError
from jetrl.launch.args import closest

# The parts VeRL builds its dataclasses from in every job; `reward` it reads as it is, critic and distillation only when on.
CHECKED = ("actor_rollout_ref", "algorithm")
# Keys that VeRL reads from the node and takes out before it builds the dataclass.
READ_BEFORE = {
    "actor_rollout_ref.ref": {
        "log_prob_micro_batch_size",
        "log_prob_micro_batch_size_per_gpu",
        "log_prob_use_dynamic_bsz",
        "log_prob_max_token_len_per_gpu",
    },
}
PLAIN = {int: (int,), float: (int, float), bool: (bool,)}


def check(cfg: DictConfig) -> None:
    """Raise UserError for a key that a VeRL dataclass lacks, or a number or bool of the wrong type."""
    from hydra.utils import get_class

    for path, node in _targets(cfg, ""):
        if path.split(".")[0] not in CHECKED:
            continue
        cls = get_class(node._get_node("_target_")._value())
        if not dataclasses.is_dataclass(cls):
            continue
        names = [f.name for f in dataclasses.fields(cls)]
        hints = typing.get_type_hints(cls)
        for key in node:
            if key == "_target_" or key in READ_BEFORE.get(path, ()):
                continue
            if key not in names:
                raise UserError(
                    f"{path}.{key} is not a key of VeRL's {cls.__name__}{closest(str(key), names)}; remove or correct it"
                )
            # An interpolation is checked where the value stands, under the key that the user set.
            if not OmegaConf.is_missing(node, key) and not OmegaConf.is_interpolation(node, key):
                _check_type(f"{path}.{key}", hints[key], node[key])


def _targets(node: DictConfig, path: str) -> Iterator[tuple[str, DictConfig]]:
    if "_target_" in node:
        yield path, node
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none() and not child._is_interpolation():
            yield from _targets(child, f"{path}.{key}" if path else str(key))


def _check_type(key: str, hint: object, value: object) -> None:
    """Only int, float and bool, with or without None: other annotations of VeRL's are not meant strictly."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if not all(option in PLAIN or option is type(None) for option in options):
        return
    if value is None:
        return  # VeRL's own defaults hold None where the annotation says int
    if isinstance(value, bool) and bool not in options:
        fits = False
    else:
        fits = any(isinstance(value, PLAIN[option]) for option in options if option in PLAIN)
    if not fits:
        wanted = " or ".join(
            {int: "a whole number", float: "a number", bool: "true or false"}.get(o, "null") for o in options
        )
        raise UserError(f"{key}={value} must be {wanted}")
