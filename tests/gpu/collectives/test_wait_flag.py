"""A stream goes on when a flag has its value."""

from __future__ import annotations

import pytest
import torch

from pykernels.errors import PykernelsError
from pykernels.gpu.collectives.wait_flag import wait_flag


def test_a_flag_that_is_set_holds_up_nothing(device: torch.device) -> None:
    flag = torch.tensor([7], device=device)
    wait_flag(flag, 7)
    assert flag.tolist() == [7]


@pytest.mark.gpu
def test_a_stream_waits_for_what_another_one_sets() -> None:
    from pykernels.gpu.common.stream_memory import write_value

    flag = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    x = torch.zeros(1 << 20, device="cuda")
    wait_flag(torch.ones_like(x[:1], dtype=torch.int64), 1)  # compiles
    waiting, setting = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(waiting):
        wait_flag(flag, 1)
        seen = x.clone()
    with torch.cuda.stream(setting):
        torch.cuda._sleep(10_000_000)
        x.fill_(3)
        write_value(flag.data_ptr(), 1)
    assert not waiting.query()
    torch.cuda.synchronize()
    assert bool((seen == 3).all())


def test_another_flag_is_refused(device: torch.device) -> None:
    for flag in (torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)):
        with pytest.raises(PykernelsError):
            wait_flag(flag.to(device), 0)


def _compile() -> None:
    wait_flag(torch.empty(1, dtype=torch.int64, device="meta"), 1)


COMPILES = [("a flag", _compile)]
