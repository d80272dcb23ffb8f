"""Checkpoints of GPTQ (AutoGPTQ, GPTQModel): 4 bits with zero points.

=============  ==============================================================================
``X.qweight``  int32 [K / 8, N]: inputs 8 r to 8 r + 7 of an output a word, the first lowest
``X.qzeros``   int32 [K / group, N / 8]: eight outputs a word, the first lowest; one less than
               the zero point, but in `checkpoint_format` "gptq_v2"
``X.scales``   float16 [K / group, N]
``X.g_idx``    int32 [K]: the group of each input; only k // group is read (no act-order)
``X.bias``     zeros where the model has no bias: some writers add them
=============  ==============================================================================

Source: github.com/ModelCloud/GPTQModel, ``gptqmodel/nn_modules/qlinear`` and
``utils/model.py`` (``convert_gptq_v1_to_v2_format``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pykernels.errors import PykernelsError

from .words import HINT, needing, unpack_nibbles


def check_config(config: dict[str, Any], folder: Path) -> None:
    """Raise `PykernelsError` for a `quantization_config` of GPTQ that is not read.

    `desc_act` (act-order) may be true: what counts is ``X.g_idx``.
    """
    need = needing("GPTQ", folder)
    need("bits", config.get("bits"), (4,))
    need("checkpoint_format", config.get("checkpoint_format"), (None, "gptq", "gptq_v2"))
    need("dynamic", config.get("dynamic"), (None, {}))


def layout(config: dict[str, Any]) -> str:
    """ "gptq", or "gptq_v2" whose zero points are stored as they are."""
    return config.get("checkpoint_format") or "gptq"


def codes(words: torch.Tensor) -> torch.Tensor:
    """``X.qweight`` -> uint8 [N, K]."""
    return unpack_nibbles(words.T)


def zeros(words: torch.Tensor, less: int) -> torch.Tensor:
    """``X.qzeros`` -> uint8 [groups, N]; stored ones are ``less`` than the zero points."""
    return unpack_nibbles(words) + less


def check_order(order: torch.Tensor, groups: int, name: str) -> None:
    """Raise `PykernelsError` unless inputs lie in the order of their groups."""
    K = len(order)
    in_order = torch.arange(K, dtype=torch.int64, device="cpu") // (K // groups)
    if not torch.equal(order.long(), in_order):
        raise PykernelsError(
            f"{name} has its inputs in another order (GPTQ's act-order, desc_act), which cannot be "
            "read",
            HINT,
        )
