"""What the launcher said, read before anything of Accelerate adds to it."""

from __future__ import annotations

import os

from hf_fsdp.config.environment import scrubbed_fsdp_environment

_environment_at_start: dict[str, str] = {}


def launch_environment() -> dict[str, str]:
    """Return the environment as the launcher left it, rid of stray `FSDP_*` variables.

    Taken once: building an FSDP plugin sets ``ACCELERATE_USE_FSDP`` itself, so later it says nothing about the launch.
    """
    if not _environment_at_start:
        scrub = scrubbed_fsdp_environment(os.environ)
        for name in scrub.names:
            del os.environ[name]
        if scrub.line and int(os.environ.get("RANK", 0)) == 0:
            print(scrub.line)
        _environment_at_start.update(os.environ)
    return dict(_environment_at_start)
