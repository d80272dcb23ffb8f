"""Checkpoints of GPTQ (AutoGPTQ, GPTQModel): 4 bits with zero points.

=============  ==============================================================================
``X.qweight``  int32 [K / 8, N]: inputs 8 r to 8 r + 7 of an output a word, the first lowest
``X.qzeros``   int32 [K / group, N / 8]: eight zero points a word, the first output's lowest;
               of the word, 0x11111111 is subtracted, but in `checkpoint_format` "gptq_v2"
``X.scales``   float16 [K / group, N]
``X.g_idx``    int32 [K]: the group of each input; only k // group is read (no act-order)
``X.bias``     zeros where the model has no bias: some writers add them
=============  ==============================================================================

Older writers (AutoGPTQ, AutoRound) subtract 1 of each zero point before they pack it, which is the
same unless a zero point is 0: GPTQModel's 0 borrows from the outputs above, and comes back; theirs
overwrites them, and nothing brings those back.

Sources: github.com/ModelCloud/GPTQModel, ``gptqmodel/nn_modules/qlinear`` and ``utils/model.py``
(``convert_gptq_v1_to_v2_format``); github.com/AutoGPTQ/AutoGPTQ, pull request 640. Symmetric zero
points under the other label: github.com/vllm-project/vllm, pull request 38966.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pykernels.errors import PykernelsError

from .words import HINT, needing, unpack_nibbles

LESS = {"gptq": 0x11111111, "gptq_v2": 0}
"""What is subtracted of a word of zero points, by layout."""
MIDDLE = 8
"""The zero point of symmetric codes."""
EIGHTS = MIDDLE * 0x11111111 - (1 << 32)
"""A word of them, an int32."""


def check_config(config: dict[str, Any], folder: Path) -> None:
    """Raise `PykernelsError` for a `quantization_config` of GPTQ that is not read.

    `desc_act` (act-order) may be true: what counts is ``X.g_idx``. `dynamic` may name modules that
    are not quantized ("-:"), or as all others are: a module is if its stored tensors are.
    """
    need = needing("GPTQ", folder)
    need("bits", config.get("bits"), (4,))
    need("checkpoint_format", config.get("checkpoint_format"), (None, "gptq", "gptq_v2"))
    dynamic = config.get("dynamic") or {}
    alike = isinstance(dynamic, dict) and all(
        pattern.startswith("-:") or not change for pattern, change in dynamic.items()
    )
    need("dynamic", dynamic, (dynamic,) if alike else ())


def layout(config: dict[str, Any]) -> str:
    """ "gptq", or "gptq_v2" whose zero points are stored as they are."""
    return config.get("checkpoint_format") or "gptq"


def is_symmetric(config: dict[str, Any]) -> bool:
    """Whether all zero points are `MIDDLE`, as they are unless the config denies it."""
    return config.get("sym", True) is not False


def codes(words: torch.Tensor) -> torch.Tensor:
    """``X.qweight`` -> uint8 [N, K]."""
    return unpack_nibbles(words.T)


def zeros(words: torch.Tensor, layout: str, symmetric: bool) -> tuple[torch.Tensor, str]:
    """``X.qzeros`` -> uint8 [groups, N], and the layout that they are in.

    Some writers say "gptq" beside symmetric zero points of "gptq_v2": they are told by their value.
    """
    if symmetric:
        alike = (name for name, less in LESS.items() if bool((words + less == EIGHTS).all()))
        layout = next(alike, layout)
    return unpack_nibbles(words + LESS[layout]), layout  # an int32 wraps, as the writer's did


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
