"""Save every golden processor as ours, and all that it computes, for `make.py --check` in the golden environment.

.venv/bin/python tests/golden/processors/save_ours.py FOLDER
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import cases
from safetensors.torch import save_file

from hf_fsdp.data.processors import load_processor


def main(folder: Path) -> None:
    for family in cases.FAMILIES:
        source, target = cases.HERE / family / "source", folder / family
        shutil.rmtree(target, ignore_errors=True)
        processor = load_processor(str(source))
        batches = {name: case(family, processor) for name, case in cases.CASES.items()}
        processor.save_pretrained(target / "saved")
        if family in cases.LIMITS:
            least, most = cases.LIMITS[family]
            limited = load_processor(str(source), min_pixels=least, max_pixels=most)
            batches["limits"] = cases.mixed(family, limited)
            limited.save_pretrained(target / "saved_limits")
        cases.write_old_layout(source, target / "old")
        load_processor(str(target / "old")).save_pretrained(target / "saved_old")
        tensors = {
            f"{name}.{key}": value.contiguous()
            for name, batch in batches.items()
            for key, value in cases.as_tensors(batch).items()
        }
        save_file(tensors, target / "outputs.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
