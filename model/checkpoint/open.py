"""A checkpoint by its path: a folder of safetensors, a GGUF file, or the folder of one."""

from __future__ import annotations

from pathlib import Path

from .gguf import GGUF, find_gguf
from .tensors.safetensors import Checkpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """The tensors that lie there. Raises `PykernelsError` for files that are missing or broken."""
    file = find_gguf(path)
    return Checkpoint(path) if file is None else GGUF(file)
