#!/usr/bin/env bash
# Sets up .venv on the first run, then tests: bash scripts/test.sh [--all] [arguments of pytest]
# Without --all the fast tests; with it the slow ones too (real jobs). `-m gpu` runs those for a GPU machine.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

chosen=()
if [[ "${1:-}" == --all ]]; then
    chosen=(-m "not gpu")
    shift
fi

bash "$ROOT/scripts/setup_env.sh"
export PATH="$ROOT/.venv/bin:$PATH"
cd "$ROOT"
# Two OpenMP threads that share a busy core wait for each other: a layer was seen to take 20 to 40 times as long.
export OMP_NUM_THREADS=1
exec "$ROOT/.venv/bin/python" -m pytest ${chosen[@]+"${chosen[@]}"} "$@"
