"""Copies between GPUs: the bytes of any dtype and shape, whatever word they are copied in."""

from __future__ import annotations

import pytest
import torch

from pykernels.errors import PykernelsError
from pykernels.gpu.copy_bytes import MAX_COPIES, copy_bytes

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize(
    "shapes",
    [
        [((3, 700), BF16)],
        [((2, 3, 4, 5), torch.float32), ((7,), torch.int32), ((0, 9), BF16), ((6, 2), E4M3)],
        [((5, 3), torch.uint8), ((260,), torch.int64)],
    ],
    ids=["rows", "of all ranks", "odd bytes"],
)
def test_copy_bytes(
    shapes: list[tuple[tuple[int, ...], torch.dtype]], device: torch.device
) -> None:
    sources = [
        torch.randint(0, 255, (*dims[:-1], dims[-1] * dtype.itemsize), device=device)
        .to(torch.uint8)
        .view(dtype)
        for dims, dtype in shapes
    ]
    targets = [torch.zeros_like(source) for source in sources]
    copy_bytes(sources, targets)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source.view(torch.uint8), target.view(torch.uint8))


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    x = torch.zeros(4, 8, device=device)
    for sources, targets in (
        ([x], [x[:2]]),
        ([x[:, :4]], [x[:2]]),
        ([x] * (MAX_COPIES + 1), [x] * (MAX_COPIES + 1)),
    ):
        with pytest.raises(PykernelsError):
            copy_bytes(sources, targets)


def _compile() -> None:
    x = torch.empty(4, 7168, dtype=BF16, device="meta")
    ids = torch.empty(4, 8, dtype=torch.int32, device="meta")
    copy_bytes((x, ids), (x, ids))


COMPILES = [("rows and ids", _compile)]
