"""Folders for everybody else: a checkpoint as `from_pretrained`, PEFT and vLLM load it.

`saved_model.py` opens a checkpoint, `blueprint.py` builds the model that its config describes, `plan.py` and `draft.py`
decide what is written, `folder.py` writes it beside its place and renames, `write.py` does it all; `merge_lora.py` with
`merged_source.py`, `base_model.py` and `base_weights.py` puts an adapter into its base.
"""

from hf_fsdp.checkpoint.export.draft import ExportOptions
from hf_fsdp.checkpoint.export.write import ExportReport, export_checkpoint

__all__ = ["ExportOptions", "ExportReport", "export_checkpoint"]
