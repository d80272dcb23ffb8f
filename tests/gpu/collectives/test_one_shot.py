"""All-reduce in one launch, its halves apart: launches of one GPU cannot wait for each other."""

from __future__ import annotations

import pytest
import torch

from pykernels.errors import PykernelsError
from pykernels.gpu.collectives.one_shot import (
    BLOCK,
    MAX_PROGRAMS,
    OneShotMemory,
    fits,
    one_shot_all_reduce,
)

BF16, FP32 = torch.bfloat16, torch.float32


def stop_on(device: torch.device) -> torch.Tensor:
    word = torch.zeros(1, dtype=torch.int32)
    return word.pin_memory() if device.type == "cuda" else word


@pytest.mark.parametrize(("members", "dtype"), [(2, BF16), (3, FP32), (4, BF16)])
def test_all_members_get_the_same_bits(
    members: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Sums of several sizes one behind the other, as layers and steps are."""
    memory, stop = [OneShotMemory.on(device) for _ in range(members)], stop_on(device)
    for T, H in ((1, 2048), (3, 100), (1, 5000), (2, 1500), (1, 8)):
        x = [torch.randn(T, H, device=device).to(dtype) for _ in range(members)]
        out = [torch.full((T, H), torch.nan, dtype=dtype, device=device) for _ in x]
        for half in ("send", "add"):
            for rank in range(members):
                only = {"send": half == "send", "add": half == "add"}
                one_shot_all_reduce(x[rank], memory, rank, stop, out[rank], **only)
        truth = x[0].float()
        for part in x[1:]:
            truth = truth + part
        assert all(torch.equal(each, truth.to(dtype)) for each in out)
    assert int(stop) == 0


def test_whoever_does_not_come_stops_the_others(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pykernels.gpu.collectives.one_shot.SPINS", 3)
    memory, stop = [OneShotMemory.on(device) for _ in range(2)], stop_on(device)
    x = torch.ones(1, 64, device=device)
    one_shot_all_reduce(x, memory, 0, stop, torch.empty_like(x))
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert int(stop) == 1


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    memory, stop = [OneShotMemory.on(device) for _ in range(2)], stop_on(device)
    x = torch.zeros(4, 64, device=device)
    many = torch.zeros(MAX_PROGRAMS, BLOCK + 1, device=device)
    assert fits(16 * 7168, 4) and not fits(many.numel(), 2) and not fits(8, 1)
    for given, out in ((x.int(), x), (x, x[:2]), (x[:, ::2], x[:, :32]), (many, many)):
        with pytest.raises(PykernelsError):
            one_shot_all_reduce(given, memory, 0, stop, out)


def _compile(members: int, dtype: torch.dtype) -> None:
    x = torch.empty(4, 7168, dtype=dtype, device="meta")
    memory = [OneShotMemory.on(x.device) for _ in range(members)]
    stop = torch.empty(1, dtype=torch.int32, device="meta")
    one_shot_all_reduce(x, memory, members - 1, stop, x)


COMPILES = [("two, bf16", lambda: _compile(2, BF16)), ("four, float32", lambda: _compile(4, FP32))]
