"""Hydra's and OmegaConf's errors as one sentence with the key, the value and what would be right."""

import difflib
import re

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException

from jetrl.errors import UserError


def check_grammar(word: str) -> None:
    """UserError for an override that Hydra cannot parse; its own error for a list of them does not say which."""
    try:
        OverridesParser.create().parse_override(word)
    except HydraException as e:
        raise UserError(f"{word} is not an override that Hydra can read: {_first_line(str(e))}") from e


def explain(error: Exception, cfg: DictConfig | None = None, overrides: tuple[str, ...] = ()) -> UserError:
    """The UserError for an exception of Hydra or OmegaConf. cfg: the composed config, if it got that far."""
    root = _root(error)
    text = _first_line(str(root)) or _first_line(str(error))
    outer = _chain(error)
    if "sweep" in outer and "multirun" in outer:
        word = _quoted(outer, overrides)
        return UserError(f"{word} gives several values; add -m to run one job for each of them")
    if isinstance(root, (ConfigKeyError, ConfigAttributeError)):
        return UserError(_unknown_key(root, outer, overrides))
    if isinstance(root, InterpolationResolutionError):
        return UserError(f"{_key(root)} cannot be resolved: {text}")
    if isinstance(root, OmegaConfBaseException):
        return UserError(f"{_key(root)}: {text}")
    return UserError(f"{_quoted(outer, overrides)}: {text}" if overrides else text)


def _unknown_key(error: Exception, outer: str, overrides: tuple[str, ...]) -> str:
    key = getattr(error, "full_key", None) or _first_match(r"full_key: ([\w.]+)", str(error)) or "the key"
    near = _near_keys(error, key)
    word = next((w for w in overrides if f"{w.lstrip('+~').partition('=')[0]}.".startswith(f"{key}.")), key)
    return (
        f"{word}: {key} is not a key{near}; "
        f"--cfg job prints all keys, and +{word.lstrip('+~')} adds one that only VeRL's free-form parts know"
    )


def _near_keys(error: Exception, key: str) -> str:
    parent = getattr(error, "parent_node", None)
    if not isinstance(parent, DictConfig) or parent._is_none():
        return ""
    prefix, _, last = key.rpartition(".")
    matches = difflib.get_close_matches(last, [str(k) for k in parent], n=3)
    names = [f"{prefix}.{match}" if prefix else match for match in matches]
    return f" (did you mean {' or '.join(names)}?)" if names else ""


def _root(error: BaseException) -> BaseException:
    """The innermost exception of Hydra's chain: the one that says what was wrong."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _chain(error: BaseException | None) -> str:
    """Every message of the chain: Hydra names the override in an outer one."""
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__
    return "\n".join(texts)


def _key(error: Exception) -> str:
    return getattr(error, "full_key", None) or "the configuration"


def _quoted(text: str, overrides: tuple[str, ...]) -> str:
    """The override that an error text speaks of."""
    hits = [word for word in overrides if word in text or word.partition("=")[0].lstrip("+~") in text]
    return hits[0] if hits else f"one of {', '.join(overrides)}" if len(overrides) > 1 else "".join(overrides)


def _first_line(text: str) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return re.sub(r"\s+", " ", line).rstrip(".")


def _first_match(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match.group(1) if match else None


def as_yaml(cfg: DictConfig) -> str:
    return OmegaConf.to_yaml(cfg, resolve=True)
