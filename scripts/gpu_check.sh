#!/usr/bin/env bash
# One short command for a machine with at least one CUDA device: the GPU tests, then one short run of the demo's model.
# Not part of scripts/test.sh. Uses the Python it finds (HF_FSDP_PYTHON, else .venv, else python3) as it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${HF_FSDP_PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 WANDB_MODE=offline
"$python" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"; print(torch.__version__, torch.cuda.get_device_name())'
"$python" -m pytest -q -m gpu tests/gpu "$@"
