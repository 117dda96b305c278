#!/usr/bin/env bash
# One short command for a machine with at least one CUDA device: the GPU tests, then the planner against the card
# (benchmarks/plan_gpu.py: predicted against real memory, speed; into runs/plan_gpu, or $HF_FSDP_GPU_CHECK).
# Not part of scripts/test.sh. Uses the Python it finds (HF_FSDP_PYTHON, else .venv, else python3) as it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${HF_FSDP_PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 WANDB_MODE=offline
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "error: there is no CUDA device here, so there is nothing to check." >&2
  exit 2
fi
"$python" -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())'
status=0
"$python" -m pytest -q -m gpu tests/gpu "$@" || status=$?
"$python" benchmarks/plan_gpu.py -o "${HF_FSDP_GPU_CHECK:-runs/plan_gpu}" || status=$?
exit "$status"
