"""How programs are dealt out to sequences: Triton's deal and Gluon's against a loop."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from pykernels.gpu.attention import online_softmax
from pykernels.gpu.attention.hopper import split_kv
from pykernels.gpu.common import launch

from .gluon_shim import interpreted

_triton_share = online_softmax.share_of_slot
_gluon_share = split_kv.share_of_slot
KEYS, BATCH = 64, 32


@triton.jit
def _by_triton(
    lengths, out, B, slots, S, window,
    KEYS: tl.constexpr, BATCH: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    b, length, part, parts = _triton_share(lengths, slot, B, slots, S, window, KEYS, BATCH, WINDOW)
    tl.store(out + slot * 4, b)
    tl.store(out + slot * 4 + 1, length)
    tl.store(out + slot * 4 + 2, part)
    tl.store(out + slot * 4 + 3, parts)


@gluon.jit
def _by_gluon(
    lengths, out, B, slots, S, window,
    KEYS: gl.constexpr, BATCH: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    slot = gl.program_id(0)
    b, length, part, parts = _gluon_share(
        lengths, slot, B, slots, S, window, KEYS, BATCH, 4, WINDOW
    )
    gl.store(out + slot * 4, b)
    gl.store(out + slot * 4 + 1, length)
    gl.store(out + slot * 4 + 2, part)
    gl.store(out + slot * 4 + 3, parts)


def dealt(lengths: list[int], slots: int, S: int, window: int) -> list[list[int]]:
    """[sequence, its length, part, parts] of each slot that has any."""
    firsts = [max(0, n - S + 1 - window) // KEYS * KEYS if window else 0 for n in lengths]
    blocks = [-(-(n - first) // KEYS) for n, first in zip(lengths, firsts, strict=True)]
    lines = []
    for b, length in enumerate(lengths):
        parts = 1 + (slots - len(lengths)) * blocks[b] // max(sum(blocks), 1)
        lines += [[b, length, part, parts] for part in range(parts)]
    return lines


@pytest.mark.parametrize(
    ("lengths", "slots", "S", "window", "why"),
    [
        ([700, 0, 64, 65, 1], 40, 1, 0, "ragged, an empty sequence, no window"),
        ([0, 0], 9, 1, 0, "no keys at all"),
        ([191, 192, 193, 640], 33, 1, 128, "a window that begins at a block's edge and beside it"),
        ([192, 193, 194, 129], 33, 2, 128, "the same for two tokens"),
        ([500] * 7, 7, 1, 100, "a slot each"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_both_deals_give_every_part_once(
    lengths: list[int], slots: int, S: int, window: int, why: str, device: torch.device
) -> None:
    given = torch.tensor(lengths, dtype=torch.int32, device=device)
    expected = dealt(lengths, slots, S, window)
    assert len(expected) <= slots
    by_gluon = interpreted(_by_gluon) if launch.interpreted() else _by_gluon
    for deal in (_by_triton, by_gluon):
        out = torch.full((slots, 4), -1, dtype=torch.int32, device=device)
        deal[(slots,)](
            given, out, len(lengths), slots, S, window, KEYS=KEYS, BATCH=BATCH, WINDOW=window > 0,
            num_warps=4,
        )  # fmt: skip
        assert out[: len(expected)].tolist() == expected
        assert out[len(expected) :, 3].eq(0).all()  # nothing to do
