"""Processors of vision-language models: loaded with or without torchvision, limited in pixels, and asked for tokens.

- `load_processor`: the official processor of a model; where torchvision is missing, the official one for images.
- `image_token_counts`: how many tokens pictures of given sizes become, without their pixels.
"""

from __future__ import annotations

from hf_fsdp.data.processors.load import load_processor
from hf_fsdp.data.processors.token_counts import image_token_counts

__all__ = ["image_token_counts", "load_processor"]
