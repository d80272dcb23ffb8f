"""What tells a model's weights from any others, without reading all of them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from transformers import PretrainedConfig

_SAMPLE = 4096
_APART = 1 << 20
"""Bytes from one sample of a file to the next: every matrix of a layer has some."""
_MOST = 8192
"""Samples of all files: a second of a disk's time where nothing of them is in memory."""
_NOT_THE_MODEL = ("transformers_version", "_name_or_path")


def identity(config: PretrainedConfig, files: Iterable[Path]) -> bytes:
    """16 bytes that are others for other weights, or for another use of them.

    Of each file it takes size and time of modification, and samples of its content; so files that
    were copied are others unless their times were kept. One of the hub's cache has its digest in
    place of a time: it is the same wherever it was downloaded.

    Raises:
        OSError: a file cannot be read.
    """
    found = hashlib.blake2b(digest_size=16)
    used = {name: v for name, v in config.to_dict().items() if name not in _NOT_THE_MODEL}
    found.update(json.dumps(used, sort_keys=True, default=str).encode())
    ordered = sorted(files)
    sizes = [path.stat().st_size for path in ordered]
    apart = max(_APART, sum(sizes) // _MOST)
    for path, size in zip(ordered, sizes, strict=True):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            version = _digest(path) or os.fstat(file).st_mtime_ns
            found.update(f"{path.name} {size} {version}".encode())
            for at in range(0, size, apart):
                found.update(os.pread(file, _SAMPLE, at))
        finally:
            os.close(file)
    return found.digest()


def _digest(path: Path) -> str | None:
    """The SHA-256 of a file's content, by which the hub's cache names it; None: it is none of
    those."""
    real = path.resolve()
    is_digest = len(real.name) == 64 and not set(real.name) - set("0123456789abcdef")
    return real.name if is_digest and real.parent.name == "blobs" else None
