"""Checkpoints in a GGUF file or a split set of them, which hold everything that there is."""

from .files import GGUF, find_gguf

__all__ = ["GGUF", "find_gguf"]
