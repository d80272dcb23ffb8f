"""Checkpoints of AWQ (AutoAWQ, llm-compressor's older exports): 4 bits with zero points.

=============  ==============================================================================
``X.qweight``  int32 [K, N / 8]: input k of eight outputs a word, in the order of ``ORDER``
``X.qzeros``   int32 [K / group, N / 8], likewise
``X.scales``   float16 [K / group, N]
=============  ==============================================================================

Source: github.com/casper-hansen/AutoAWQ, ``awq/utils/packing_utils.py`` ("gemm").
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .words import needing, unpack_nibbles

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which four bits of a word, from the lowest, each of its eight outputs has."""


def check_config(config: dict[str, Any], folder: Path) -> None:
    """Raise `PykernelsError` for a `quantization_config` of AWQ that is not read."""
    need = needing("AWQ", folder)
    need("bits", config.get("bits", config.get("w_bit")), (4,))
    need("zero_point", config.get("zero_point", True), (True,))
    need("version", str(config.get("version", "gemm")).lower(), ("gemm",))


def codes(words: torch.Tensor) -> torch.Tensor:
    """``X.qweight`` -> uint8 [N, K]."""
    return _outputs(words).T.contiguous()


def zeros(words: torch.Tensor) -> torch.Tensor:
    """``X.qzeros`` -> uint8 [groups, N]."""
    return _outputs(words)


def _outputs(words: torch.Tensor) -> torch.Tensor:
    stored = unpack_nibbles(words).view(len(words), -1, 8)
    return stored[..., ORDER].reshape(len(words), -1)
