"""Checkpoints of Intel's AutoRound: 4 bits, packed as GPTQ's or as AWQ's, by ``packing_format``.

``extra_config`` says by module what differs; a module is quantized if its stored tensors are, so it
may leave some in 16 bits. Source: github.com/intel/auto-round, ``auto_round/export``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .words import needing

METHODS = ("auto-round", "intel/auto-round")
"""Its names in ``quant_method``, the second one older."""
_LIKE = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
_BITS = (4, 16, 32)


def check_config(config: dict[str, Any], folder: Path) -> None:
    """Raise `PykernelsError` for a `quantization_config` of AutoRound that is not read."""
    need = needing("AutoRound", folder)
    need("bits", config.get("bits"), (4,))
    need("data_type", config.get("data_type"), ("int", None))
    need("packing_format", config.get("packing_format"), tuple(_LIKE))
    for name, change in (config.get("extra_config") or {}).items():
        need(f"bits of {name}", change.get("bits", 4), _BITS)


def packed_as(config: dict[str, Any]) -> str | None:
    """ "gptq" or "awq", for a `quantization_config` of either or of AutoRound; None for others."""
    method = config.get("quant_method")
    if method in METHODS:
        return _LIKE.get(str(config.get("packing_format")))
    return method if method in ("awq", "gptq") else None
