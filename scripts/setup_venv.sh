# Sourced by test.sh and demo.sh: one virtual environment with the project installed in it, made once and reused.
#
#   setup_venv VENV CONSTRAINTS REUSE_TORCH    REUSE_TORCH: yes | no
#
# Afterwards VENV_PYTHON is the environment's interpreter. Variables that a person may set:
#   PYTHON               the interpreter that makes the environment (python3)
#   HF_FSDP_VENV         the folder of the environment (.venv)
#   HF_FSDP_CONSTRAINTS  the pip constraints file (constraints/tested.txt)
# A torch at or above the floor that PYTHON or the environment already has is kept, whatever the constraints say:
# a machine's CUDA build is worth more than the tested number.

SETUP_EXTRAS="dev,recipes,vision,demo,quantization,report"

# Prints the version of torch that the interpreter "$1" has, if it is at or above the floor in pyproject.toml.
usable_torch_version() {
  "$1" - <<'PY' 2>/dev/null || true
import importlib.metadata
import re
from pathlib import Path

def numbers(version):
    return [int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3]]

floor = re.search(r'"torch>=([0-9.]+)', Path("pyproject.toml").read_text(encoding="utf-8")).group(1)
version = importlib.metadata.version("torch")
if numbers(version) >= numbers(floor):
    print(version)
PY
}

# Prints what an installation depends on, as one hash; a stamp that differs means that pip has to run again.
setup_stamp() {
  { cat pyproject.toml "$1"; printf '%s %s\n' "$SETUP_EXTRAS" "$PWD"; "$2" --version; } |
    "$2" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

setup_venv() {
  local venv=$1 constraints=$2 reuse_torch=$3
  local python=${PYTHON:-python3} torch="" site_flag="" stamp
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "error: $python is older than Python 3.10, or is not there." >&2
    echo "  fix   PYTHON=/path/to/python3.10-or-newer bash $0" >&2
    return 1
  fi
  if [[ ! -f $constraints ]]; then
    echo "error: the constraints file $constraints is not there." >&2
    echo "  fix   unset HF_FSDP_CONSTRAINTS, or set it to an existing file" >&2
    return 1
  fi

  # bin/pip is the last thing that venv writes: without it the folder is what an interrupted run left.
  if [[ ! -x $venv/bin/python || ! -x $venv/bin/pip ]]; then
    [[ $reuse_torch == yes ]] && torch=$(usable_torch_version "$python")
    [[ -n $torch ]] && site_flag="--system-site-packages"
    echo "setup: making $venv with $("$python" --version)${torch:+, reusing its torch $torch}"
    "$python" -m venv --clear $site_flag "$venv"
  fi
  VENV_PYTHON=$(cd "$venv/bin" && pwd)/python

  stamp=$(setup_stamp "$constraints" "$VENV_PYTHON")
  if [[ -f $venv/hf-fsdp-stamp && $(<"$venv/hf-fsdp-stamp") == "$stamp" ]]; then
    echo "setup: $venv is up to date"
    return 0
  fi

  local effective=$venv/hf-fsdp-constraints.txt
  cp "$constraints" "$effective"
  if [[ $reuse_torch == yes ]]; then
    torch=$(usable_torch_version "$VENV_PYTHON")
    if [[ -n $torch ]]; then
      { grep -v '^torch==' "$constraints"; echo "torch==$torch"; } >"$effective"
    fi
  fi
  echo "setup: installing the project and its dependencies with pip under $constraints${torch:+ and the torch $torch that is there}"
  "$VENV_PYTHON" -m pip install -qq --disable-pip-version-check -c "$effective" -e ".[$SETUP_EXTRAS]"
  echo "$stamp" >"$venv/hf-fsdp-stamp"
}
