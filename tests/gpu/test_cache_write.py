"""Rows go to their slots of a cache, byte by byte."""

from __future__ import annotations

import pytest
import torch

from pykernels.errors import PykernelsError
from pykernels.gpu.cache_write import cache_write

PARTS = {
    "k": (torch.bfloat16, (2, 300)),
    "v": (torch.float8_e4m3fn, (7,)),
    "s": (torch.float32, ()),
}


def test_rows_go_to_their_slots(device: torch.device) -> None:
    slots, P, PAGE = [9, -1, 0, 24, 23], 3, 8
    rows, caches = [], []
    for kind, row in PARTS.values():
        rows.append(torch.randn(5, *row).to(kind))
        caches.append(torch.full((P, PAGE, *row), 3.0).to(kind))
    there = [cache.to(device) for cache in caches]
    mapping = torch.tensor(slots, dtype=torch.int32, device=device)
    cache_write([x.to(device) for x in rows], there, mapping)
    for source, cache, written in zip(rows, caches, there, strict=True):
        expected = cache.flatten(0, 1).float()
        for t, slot in enumerate(slots):
            if 0 <= slot < P * PAGE:
                expected[slot] = source[t].float()
        assert torch.equal(written.cpu().flatten(0, 1).float(), expected)


def test_other_rows_are_refused(device: torch.device) -> None:
    cache, rows = (torch.zeros(size, 8, 4, device=device) for size in (2, 3))
    mapping = torch.zeros(3, dtype=torch.int32, device=device)
    for wrong in (rows, rows[:, 0].half(), rows[:2, 0]):
        with pytest.raises(PykernelsError, match="rows .* for a cache .* of 16 slots, 3 tokens"):
            cache_write([wrong], [cache], mapping)


def _compile(*kinds: torch.dtype) -> None:
    meta = torch.device("meta")
    rows = [torch.empty(9, 4, 128, device=meta, dtype=kind) for kind in kinds]
    caches = [torch.empty(3, 64, 4, 128, device=meta, dtype=kind) for kind in kinds]
    cache_write(rows, caches, torch.empty(9, device=meta, dtype=torch.int32))


COMPILES = [
    ("two parts", lambda: _compile(torch.bfloat16, torch.bfloat16)),
    ("four parts", lambda: _compile(*(torch.float8_e4m3fn, torch.float32) * 2)),
]
