"""What a held-out figure is to be read against: `xz -9e`, and how much the files repeat others."""

import lzma
from collections.abc import Sequence

from .corpus import SourceFile, total_bytes

_DICTIONARY = 64 * 2**20
"""xz -9's own dictionary, in bytes: it spans the whole corpus."""
_SHORT_LINE = 12
"""Lines of fewer characters (`else:`, `return x`) are shared by all programs."""


def xz_bits_per_byte(files: Sequence[SourceFile], known: Sequence[SourceFile]) -> dict[str, float]:
    """`xz -9e` on `files`, in bits per byte of theirs.

    `concatenated`: one stream in path order. `per_file`: each file alone. `after_known`: what the
    stream adds to the compressed size of the `known` files when it follows them.
    """
    nbytes = total_bytes(files)
    stream = b"".join(f.data for f in files)
    result = {
        "concatenated": 8 * _xz_size(stream) / nbytes,
        "per_file": 8 * sum(_xz_size(f.data) for f in files) / nbytes,
    }
    if known:
        before = b"".join(f.data for f in known)
        if len(before) + len(stream) > _DICTIONARY:
            raise ValueError(f"the corpus is larger than xz's dictionary of {_DICTIONARY} bytes")
        result["after_known"] = 8 * (_xz_size(before + stream) - _xz_size(before)) / nbytes
    return result


def _xz_size(data: bytes) -> int:
    return len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))


def shared_line_fraction(files: Sequence[SourceFile], known: Sequence[SourceFile]) -> float:
    """The share of the files' text, by characters, on lines that a known file has too."""
    seen = {line.strip() for f in known for line in f.text.splitlines()}
    lines = [line.strip() for f in files for line in f.text.splitlines()]
    lines = [line for line in lines if len(line) >= _SHORT_LINE]
    return sum(len(line) for line in lines if line in seen) / max(1, sum(map(len, lines)))
