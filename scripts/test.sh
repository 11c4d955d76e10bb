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
exec "$ROOT/.venv/bin/python" -m pytest ${chosen[@]+"${chosen[@]}"} "$@"
