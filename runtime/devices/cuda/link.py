"""The link between main memory and a GPU."""

from __future__ import annotations

import torch

_BYTES, _ROUNDS = 64 << 20, 5


def link_rate(gpu: torch.device) -> float:
    """Bytes a second that copies from pinned main memory bring, while nothing else runs."""
    source = torch.empty(_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    target = torch.empty(_BYTES, dtype=torch.uint8, device=gpu)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(gpu):
        target.copy_(source, non_blocking=True)  # wakes the link
        begin.record()
        for _ in range(_ROUNDS):
            target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
    return _ROUNDS * _BYTES / max(1e-9, begin.elapsed_time(end) / 1e3)
