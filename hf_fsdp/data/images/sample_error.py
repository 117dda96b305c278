"""A problem of a sample that is found while training reads it, perhaps in a worker process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_fsdp.errors import DataError, Problem

_NAME = "SampleError: "


class SampleError(DataError):
    """Raised for rows of a batch.

    A `DataLoader` makes it anew in the main process, of a text that holds the worker's whole traceback; what a person
    needs is the end of it.
    """

    def __init__(self, problems: str | Problem | Sequence[Problem], **others: Any):
        if isinstance(problems, str) and "Original Traceback" in problems and _NAME in problems:
            message, _, fix = problems.rsplit(_NAME, 1)[1].strip().rpartition("\n  fix   ")
            problems = Problem(message=message or fix, fix=fix if message else "look at the sample")
        super().__init__(problems, **others)
