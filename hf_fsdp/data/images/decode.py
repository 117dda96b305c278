"""Pictures opened by a pool of threads, with the last ones kept in memory; made anew in every process."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import xxhash

from hf_fsdp.data.images.open import ImageLimits, open_image
from hf_fsdp.data.images.references import Reference
from hf_fsdp.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

_NUM_CHANNELS = 3


class ImageCache:
    """The pictures used last, as RGB, bounded in bytes; safe to use from several threads.

    Args:
        max_bytes: bytes of decoded pixels to keep; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._images: OrderedDict[Any, Image] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._images)

    def get(self, key: Any) -> Image | None:
        """Return a kept picture, which the caller must not change; None when it is not there."""
        with self._lock:
            image = self._images.get(key)
            if image is not None:
                self._images.move_to_end(key)
            return image

    def put(self, key: Any, image: Image) -> None:
        """Keep a picture, in place of those not used for longest."""
        size = image.width * image.height * _NUM_CHANNELS
        if size > self.max_bytes:
            return
        with self._lock:
            if key in self._images:
                return
            self._images[key] = image
            self.num_bytes += size
            while self.num_bytes > self.max_bytes:
                _, oldest = self._images.popitem(last=False)
                self.num_bytes -= oldest.width * oldest.height * _NUM_CHANNELS


class ImageDecoder:
    """Opens the pictures of a batch in parallel.

    Threads and locks do not survive a fork and cannot be pickled, so each process makes its own when it first opens
    something: a `DataLoader` may fork or spawn its workers.

    Args:
        limits: for every picture.
        num_threads: pictures opened at a time; PIL decodes outside of Python's lock.
        cache_bytes: decoded pixels to keep, in each process.
    """

    def __init__(self, limits: ImageLimits, *, num_threads: int, cache_bytes: int):
        self.limits = limits
        self.num_threads = num_threads
        self.cache_bytes = cache_bytes
        self._process: int | None = None
        self._pool: ThreadPoolExecutor | None = None
        self.cache = ImageCache(cache_bytes)

    def __getstate__(self) -> dict[str, Any]:
        return {"limits": self.limits, "num_threads": self.num_threads, "cache_bytes": self.cache_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ImageDecoder.__init__(self, state["limits"], num_threads=state["num_threads"], cache_bytes=state["cache_bytes"])

    def open_all(self, references: Sequence[Reference]) -> list[Image | DataError]:
        """Return each picture, or why it could not be opened, in the order of `references`."""
        self._prepare()
        if self._pool is None or len(references) < 2:
            return [self._open(reference) for reference in references]
        futures: list[Future[Image | DataError]] = [self._pool.submit(self._open, item) for item in references]
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads of this process; they are made again when they are needed."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown()
        self._pool, self._process = None, None

    def _prepare(self) -> None:
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        self._pool = ThreadPoolExecutor(self.num_threads, "images") if self.num_threads > 1 else None
        self.cache = ImageCache(self.cache_bytes)

    def _open(self, reference: Reference) -> Image | DataError:
        key = _key(reference) if self.cache_bytes else None
        image = self.cache.get(key) if key is not None else None
        if image is None:
            try:
                image = open_image(reference, self.limits)
            except DataError as error:
                return error
            if key is not None:
                self.cache.put(key, image)
        return image


def _key(reference: Reference) -> Any:
    if reference.get("bytes") is not None:
        return xxhash.xxh3_128_digest(reference["bytes"])
    return reference.get("path")
