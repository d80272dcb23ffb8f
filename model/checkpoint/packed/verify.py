"""Read a whole packed cache and compare it with its checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from pykernels.errors import PykernelsError

from .manifest import AGAIN, read_manifest
from .mapped import MappedFile, described
from .write import digest


def header_digest(file: Path) -> str:
    """SHA-256 of a file's header, in which the digests of its tensors are."""
    with file.open("rb") as stream:
        return hashlib.sha256(stream.read(int.from_bytes(stream.read(8), "little"))).hexdigest()


def verify(folder: Path, report: Callable[[int, int], None] = lambda done, total: None) -> int:
    """Checks every byte of a cache; returns their number.

    Raises `PykernelsError` naming the first file that is not what was written.
    """
    manifest = read_manifest(folder)
    total = sum(int(entry["bytes"]) for entry in manifest.files.values())
    done = 0
    for name, entry in manifest.files.items():
        file = MappedFile(folder / name)
        if header_digest(file.path) != entry["header"]:
            raise _damaged(file, "its header")
        for tensor, expected in described(file, "sha256").items():
            info = file.tensors.get(tensor)
            if info is None or digest(file.memory[info.start : info.stop].numpy().data) != expected:
                raise _damaged(file, tensor)
        done += file.memory.nbytes
        report(done, total)
    return done


def _damaged(file: MappedFile, what: str) -> PykernelsError:
    return PykernelsError(
        f"{file.path} is damaged: {what} has another checksum than when it was written",
        f"Delete that file. {AGAIN}",
    )
