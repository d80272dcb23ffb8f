"""The manifest of a packed cache: what made it, of what, and which files it is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pykernels import __version__
from pykernels.errors import PykernelsError

from ..tensors.safetensors import Checkpoint, read_json
from .write import replace_file

PACKED = "packed.json"
CONVERTING = "converting.json"
"""The manifest while files are still missing."""
LAYOUT = 3
"""Version of the bytes in these files, which are those of `pykernels.quant.layout`, the same for
every CPU backend. Add 1 whenever packing the same weights gives other bytes (tile order, blocks or
scales of a format, sections of `PackedExperts`) or lowering asks for other objects (which matrices
become one): a cache of another version is refused, never guessed at."""
_WORK = {
    "model_type": "family",
    "identity": "source",
    "rules": "rules",
    "experts": "--format",
    "linears": "--linears",
}
AGAIN = "Convert the checkpoint again (pykernels convert)"


@dataclass(frozen=True)
class Manifest:
    """One cache.

    Attributes:
        source: folder that it was made from, and `identity`: of its tensors, files and config.
        model_type: as in config.json.
        rules: that modules were injected by, and which hold when it is loaded.
        experts, linears: formats that were asked for; None: as stored.
        schema: of the weights, see `model.architectures.schema`.
        files: name -> bytes and the digest of its header, which has those of its tensors. None
            until it is complete.
        layout, version: `LAYOUT`, and of the package that wrote it.
    """

    source: str
    identity: str
    model_type: str
    rules: list[dict[str, Any]]
    experts: str | None
    linears: str | None
    schema: dict[str, Any]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    layout: int = LAYOUT
    version: str = __version__

    def difference(self, other: Manifest) -> str | None:
        """What makes another conversion give other files; None if nothing does."""
        for name, what in _WORK.items():
            if getattr(self, name) != getattr(other, name):
                return what
        return None

    def write(self, folder: Path) -> None:
        """Whole or not at all; a complete one takes the place of `CONVERTING`."""
        text = json.dumps(asdict(self), indent=1).encode()
        replace_file(folder / (PACKED if self.files else CONVERTING), [text])
        if self.files:
            (folder / CONVERTING).unlink(missing_ok=True)


def is_packed(folder: Path) -> bool:
    """Whether a folder is a packed cache, or will be one."""
    return any((folder / name).is_file() for name in (PACKED, CONVERTING))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete cache, its files there and of their sizes.

    Raises `PykernelsError` for one that is half converted, of another layout version or damaged.
    """
    if not is_packed(folder):
        raise PykernelsError(f"{folder} is no packed cache", "Make one with pykernels convert")
    if not (folder / PACKED).is_file():
        raise PykernelsError(
            f"{folder} is a packed cache whose conversion was interrupted",
            "Run the same pykernels convert again: it goes on where it was",
        )
    manifest = parse(folder / PACKED)
    for name, entry in manifest.files.items():
        file = folder / name
        size = file.stat().st_size if file.is_file() else None
        if size != entry.get("bytes"):
            state = "is missing" if size is None else f"has {size} bytes, not {entry.get('bytes')}"
            raise PykernelsError(f"{file} {state}", AGAIN)
    return manifest


def parse(file: Path) -> Manifest:
    """One manifest. Raises `PykernelsError`."""
    data = read_json(file)
    if data.get("layout") != LAYOUT:
        raise PykernelsError(
            f"{file.parent} has the packed layout {data.get('layout')!r}, this version reads"
            f" {LAYOUT}",
            AGAIN,
        )
    try:
        return Manifest(**data)
    except TypeError:
        raise PykernelsError(f"{file} is no manifest of a packed cache", AGAIN) from None


def identity(checkpoint: Checkpoint, config: Path | None) -> str:
    """What tells one source from another: names, places and times of its tensors, no values."""
    digest = hashlib.sha256(config.read_bytes() if config is not None else b"")
    files: Iterable[Path] = {info.file for info in checkpoint.tensors.values()}
    for file in sorted(files):
        digest.update(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}\n".encode())
    for name, info in sorted(checkpoint.tensors.items()):
        digest.update(f"{name} {info.dtype} {info.shape} {info.start} {info.stop}\n".encode())
    return digest.hexdigest()
