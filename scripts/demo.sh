#!/usr/bin/env bash
# Fine-tunes a small real language model under real FSDP on this machine's CPU and checks the claims of the README.
#
#   bash scripts/demo.sh            LoRA
#   bash scripts/demo.sh --full     all weights (about 5 GB of disk)
#   bash scripts/demo.sh --vlm      a tiny vision-language model learns to read handwritten digits
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup_venv.sh

venv=${HF_FSDP_VENV:-.venv}
model=", and a language model of 93 MB"
minutes=5
[[ ${1:-} == --vlm ]] && model="" minutes=4
[[ -f $venv/hf-fsdp-stamp ]] || cat <<TEXT
The first run downloads about 220 MB of Python packages and torch (190 MB as a CPU build; the default on Linux is a CUDA
build of 2 to 3 GB; a torch that is there is kept)$model. Later runs download nothing.
All of it takes about $minutes minutes on two idle cores after the installation, longer beside other jobs; installing prints little.
TEXT
setup_venv "$venv" "${HF_FSDP_CONSTRAINTS:-constraints/tested.txt}" yes
if [[ ${1:-} == --vlm ]]; then
  shift
  "$VENV_PYTHON" scripts/demo/run_vlm.py "$@"
else
  "$VENV_PYTHON" scripts/demo/run.py "$@"
fi
