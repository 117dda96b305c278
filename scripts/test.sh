#!/usr/bin/env bash
# Lints, type-checks and tests the project from a bare clone.
#
#   bash scripts/test.sh [PYTEST ARGUMENTS]           under constraints/tested.txt, in .venv
#   bash scripts/test.sh --floor [PYTEST ARGUMENTS]   tests only, under the lowest promised versions, in .venv-floor
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_venv.sh

floor=no
if [[ ${1:-} == --floor ]]; then
  floor=yes
  shift
fi

if [[ $floor == yes ]]; then
  setup_venv "${HF_FSDP_VENV:-.venv-floor}" "${HF_FSDP_CONSTRAINTS:-constraints/floor.txt}" no
else
  setup_venv "${HF_FSDP_VENV:-.venv}" "${HF_FSDP_CONSTRAINTS:-constraints/tested.txt}" yes
fi

# Several processes share few cores in the distributed tests; nothing here may reach a hub.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 WANDB_MODE=offline

if [[ $floor == no ]]; then
  "$VENV_PYTHON" -m ruff check .
  "$VENV_PYTHON" -m ruff format --check .
  "$VENV_PYTHON" -m mypy
fi
"$VENV_PYTHON" -m pytest "$@"
