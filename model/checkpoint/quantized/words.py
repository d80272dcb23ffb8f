"""Codes of 4 bits, eight to an int32, and what is said where they cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pykernels.errors import PykernelsError

HINT = (
    "Get the checkpoint in bf16, or in 4 bits with zero points for groups of 32, 64 or 128 inputs "
    "in their own order"
)


def needing(method: str, folder: Path) -> Callable[[str, Any, tuple[Any, ...]], None]:
    """``need(key, value, accepted)`` for a `quantization_config`, which says whose it is."""

    def need(key: str, value: Any, accepted: tuple[Any, ...]) -> None:
        if value not in accepted:
            raise PykernelsError(
                f"{folder} is quantized by {method} with {key} {value!r}, which cannot be read",
                HINT,
            )

    return need


def unpack_nibbles(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, C] -> uint8 [R, 8 C], values 0 .. 15: of each word the lowest bits first."""
    # Little endian: a byte's low nibble comes first. In place on int16: an expert of DeepSeek-V3
    # has 15 million codes.
    pairs = words.contiguous().view(torch.uint8).to(torch.int16)
    pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F)
    return pairs.view(torch.uint8)
