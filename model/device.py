"""The device that everything but the routed experts runs on: "cpu" or a CUDA GPU."""

from __future__ import annotations

import torch

from pykernels.errors import PykernelsError


def check_device(device: str | torch.device) -> torch.device:
    """`device` if this machine has it, else `PykernelsError`."""
    try:
        target = torch.device(device)
    except RuntimeError:
        raise PykernelsError(f"There is no device {device!r}", "Use cpu or cuda:0") from None
    if target.type == "cpu":
        return target
    if target.type != "cuda":
        raise PykernelsError(f"The device {device} is not supported", "Use cpu or cuda:0")
    if not torch.cuda.is_available():
        raise PykernelsError(
            f"The device {device} was asked for, but this PyTorch sees no CUDA GPU",
            "Use --device cpu, or install a CUDA build of PyTorch and the driver",
        )
    if (target.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise PykernelsError(f"There is no GPU {device}", f"The last one is cuda:{last}")
    return target
