"""What every launcher asks first: is Triton here, and can these tensors be given to a kernel?"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from ...errors import PykernelsError

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""What kernels that are no matrix products read and write."""
H200_SMS = 132


@functools.cache
def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def _driverless() -> str | None:
    """Why Triton cannot launch here, or None: it compiles its driver, in C, when first used."""
    from triton.runtime import driver

    try:
        _ = driver.active
    except Exception as error:  # whatever it is, each launch would fail with it
        return f"Triton cannot launch: {' '.join(str(error).split())}"
    return None


def supports(device: torch.device) -> str | None:
    """None if Triton kernels run on tensors of this device, or the reason why not."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (torch for CUDA brings it: or pip install triton)"
    if interpreted():
        return None if device.type == "cpu" else "TRITON_INTERPRET=1 takes tensors of the CPU"
    if device.type != "cuda":
        return f"Triton kernels run on a CUDA GPU, not on {device.type} (TRITON_INTERPRET=1 does)"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 0):
        return f"compute capability {major}.{minor} is below 8.0 (Ampere)"
    return _driverless()


def arch(device: torch.device) -> tuple[int, int]:
    """Compute capability; (0, 0) in the interpreter."""
    return (0, 0) if interpreted() else torch.cuda.get_device_capability(device)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors; a few in the interpreter, so that its tests split too, and an
    H200's for tensors without data ("meta"), whose launches only compile."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 6 if interpreted() else H200_SMS


def launches_early(device: torch.device) -> bool:
    """Whether kernels let the launch behind them begin before they end (programmatic dependent
    launch, from Hopper on). One that is launched so waits for what it reads by itself."""
    return arch(device)[0] >= 9


def early_launch(early: bool) -> dict[str, bool]:
    """Options of a launch that may begin before the kernel in front of it has ended, if ``early``.

    In a graph it becomes an edge of that kind.
    """
    return {"launch_pdl": True} if early else {}


def unsupported(*tensors: torch.Tensor | None) -> str | None:
    """None if kernels run where the first tensor lies and all lie there, or the reason why not."""
    given = [tensor for tensor in tensors if tensor is not None]
    if len({tensor.device for tensor in given}) > 1:
        return f"the inputs lie on {', '.join(sorted({str(x.device) for x in given}))}"
    return supports(given[0].device)


def check_device(*tensors: torch.Tensor) -> torch.device:
    """The one device of the tensors.

    Raises:
        PykernelsError: they lie on several, Triton kernels do not run there, or it is a GPU that is
            not the current one, where Triton would launch.
    """
    device = tensors[0].device
    if any(tensor.device != device for tensor in tensors):
        devices = ", ".join(sorted({str(tensor.device) for tensor in tensors}))
        raise PykernelsError(f"the inputs lie on {devices}", "Move them to one GPU")
    if reason := supports(device):
        raise PykernelsError(f"no GPU kernel runs here: {reason}", "Use the CPU's kernels")
    if device.type == "cuda" and device.index != (current := torch.cuda.current_device()):
        raise PykernelsError(
            f"the inputs lie on {device}, and Triton launches on the current GPU, cuda:{current}",
            f"Call it within torch.cuda.device({device.index})",
        )
    return device


def why_not(check: Callable[..., object], *arguments: Any, **options: Any) -> str | None:
    """What ``check`` has against these arguments; None if nothing."""
    try:
        check(*arguments, **options)
    except PykernelsError as error:
        return error.cause
    return None
