#!/usr/bin/env bash
# Sets up .venv on the first run, then trains: bash scripts/train.sh [arguments of python -m jetrl.train]
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

bash "$ROOT/scripts/setup_env.sh"
# vLLM and torch start programs of the environment by name (ninja), so it has to be on the path.
export PATH="$ROOT/.venv/bin:$PATH"
exec "$ROOT/.venv/bin/python" -m jetrl.train "$@"
