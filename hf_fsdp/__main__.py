"""`python -m hf_fsdp` is the `hf-fsdp` command."""

from __future__ import annotations

from hf_fsdp.cli import main

if __name__ == "__main__":
    main()
