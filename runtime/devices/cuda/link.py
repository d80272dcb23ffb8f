"""The link between main memory and a GPU."""

from __future__ import annotations

import torch

_BYTES, _ROUNDS = 64 << 20, 5


def link_rate(gpu: torch.device) -> float:
    """Bytes a second that a copy from pinned main memory brings, the fastest of a few: what else
    runs meanwhile slows some of them."""
    source = torch.empty(_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    target = torch.empty(_BYTES, dtype=torch.uint8, device=gpu)
    times = list[float]()
    with torch.cuda.device(gpu):
        target.copy_(source, non_blocking=True)  # wakes the link
        for _ in range(_ROUNDS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
    return _BYTES / max(1e-9, min(times))
