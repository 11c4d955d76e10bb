"""What of a run's record may leave the machine: no absolute path, no credential.

Records are kept and published. A path says where somebody's files lie, and VeRL's configuration has room for keys and
tokens of trackers and stores.
"""

import re
import shlex
from pathlib import Path

# The last part of a dotted key, in any case: `api_key`, `WANDB_API_KEY`, `HF_TOKEN`, `password`. Not `max_tokens`.
_CREDENTIAL = re.compile(r"(^|_)(token|secret|passwd|password|credentials?|(api|access|private|secret)_?key)$", re.I)
# A key's value that says what it is wherever it stands, and the user in an address.
_SECRET = re.compile(r"\b(?:hf|ghp|gho|github_pat|glpat|sk|xox[abp])[-_][A-Za-z0-9_-]{16,}")
_USER = re.compile(r"(?<=://)[^/@\s]+@")
# At least two parts, not within a word, an address (https://host/a/b) or a relative path.
_OUTSIDE = r"(?<![\w.~/+-])"
_ABSOLUTE = re.compile(_OUTSIDE + r"/(?:[\w.+@=-]+/)+[\w.+@=-]*")
HIDDEN = "***"


def is_credential(key: str) -> bool:
    """Whether a dotted key, or the name of a variable, holds something secret."""
    return _CREDENTIAL.search(key.lstrip("+~").rpartition(".")[2]) is not None


def clean_text(text: str, names: dict[str, str] | None = None) -> str:
    """Paths below the working directory relative, others as `.../<last part>`, secrets as ***.

    names: folder -> what stands for it instead, before everything else.
    """
    for folder, name in (names or {}).items():
        text = text.replace(folder, name)
    if Path.cwd() != Path("/"):
        text = re.sub(_OUTSIDE + re.escape(f"{Path.cwd()}/"), "", text)
    text = _USER.sub(f"{HIDDEN}@", _SECRET.sub(HIDDEN, text))
    return _ABSOLUTE.sub(lambda found: f".../{found[0].rstrip('/').rpartition('/')[2]}", text)


def clean_words(words: list[str] | tuple[str, ...], names: dict[str, str] | None = None) -> list[str]:
    """The words of a command, without those that set a credential."""
    return [clean_text(word, names) for word in words if not is_credential(word.partition("=")[0])]


def clean(value: object, names: dict[str, str] | None = None) -> object:
    """A configuration or a record (dicts, lists, plain values) without credentials, its texts cleaned."""
    if isinstance(value, dict):
        return {
            clean_text(str(key), names): shlex.join(clean_words(shlex.split(item), names))
            if key == "command" and isinstance(item, str)
            else clean(item, names)
            for key, item in value.items()
            if not is_credential(str(key))
        }
    if isinstance(value, list | tuple):
        return [clean(item, names) for item in value]
    return clean_text(value, names) if isinstance(value, str) else value
