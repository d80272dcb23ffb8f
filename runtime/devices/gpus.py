"""The GPUs of an engine: their names in programs, and what they are to torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pykernels.errors import PykernelsError
from pykernels.gpu.common.launch import supports

Gpus = Mapping[str, torch.device]
"""GPUs by the name that nodes have as their device, in the order of their layers."""
INTERPRETED = "cuda:interpreted"
HEADROOM = 1 << 30
"""Bytes of GPU memory that stay free for what nobody counts: kernels, graphs, decode's splits."""
CONTEXT = 1 << 29
"""Bytes of GPU memory that the driver takes for a process, about: its context, kernels, graphs."""


def gpus_of(devices: str) -> dict[str, torch.device]:
    """The GPUs of "cuda:0" or "cuda:0,cuda:1".

    In Triton's interpreter "cpu" is a GPU, and "cpu,cpu" are two: what tells them apart is their
    name in programs.

    Raises:
        PykernelsError: no device of that name.
    """
    gpus: dict[str, torch.device] = {}
    for number, name in enumerate(devices.split(",")):
        try:
            device = torch.device(name.strip())
        except RuntimeError:
            raise PykernelsError(
                f"no device {name.strip()!r}", "Use cpu, or cuda:0 for the first GPU"
            ) from None
        if device.type != "cuda":
            gpus[INTERPRETED + (f".{number}" if number else "")] = device
            continue
        device = torch.device("cuda", device.index or 0)
        if str(device) in gpus:
            raise PykernelsError(f"{device} is named twice in {devices!r}", "Name each GPU once")
        gpus[str(device)] = device
    return gpus


def check_device(devices: str) -> None:
    """Raises PykernelsError if there is no such GPU, or it runs no kernel of ours.

    Args:
        devices: see ``gpus_of``.
    """
    for device in gpus_of(devices).values():
        if device.type == "cuda":
            if not torch.cuda.is_available():
                raise PykernelsError(
                    f"no {device}: torch finds no CUDA GPU",
                    "Use --device cpu, or install a driver and torch's CUDA build",
                )
            try:
                torch.cuda.init()
            except RuntimeError as error:  # in a forked process whose parent uses the GPU, for one
                raise PykernelsError(
                    f"no {device}: {str(error).splitlines()[0]}",
                    "Start the process with 'spawn' if it was forked, or use --device cpu",
                ) from None
            if device.index >= (count := torch.cuda.device_count()):
                raise PykernelsError(
                    f"no {device}: there are {count} GPUs"
                    if count > 1
                    else f"no {device}: there is one GPU",
                    "Give a lower number",
                )
        if reason := supports(device):
            raise PykernelsError(f"no GPU kernel runs on {device}: {reason}", "Use --device cpu")


def usable_gpus() -> list[str]:
    """The names of the GPUs here that run kernels of ours: "cuda:0" ..."""
    if not torch.cuda.is_available():
        return []
    try:
        torch.cuda.init()
    except RuntimeError:  # in a forked process whose parent uses the GPU, for one
        return []
    count = torch.cuda.device_count()
    return [f"cuda:{i}" for i in range(count) if not supports(torch.device("cuda", i))]


def interpreted(gpus: Gpus) -> bool:
    """Whether Triton's interpreter plays the GPUs."""
    return any(device.type != "cuda" for device in gpus.values())


def free_bytes(gpus: Gpus, gpu_gib: float | None = None) -> dict[str, int]:
    """Free memory of each GPU; in the interpreter more than anything takes.

    Args:
        gpu_gib: GiB that this process may take of each (``ExecutionConfig.gpu_gib``).
    """
    free: dict[str, int] = {}
    for name, device in gpus.items():
        taken, free[name] = 0, 1 << 62
        if device.type == "cuda":
            taken, free[name] = (
                torch.cuda.memory_reserved(device),
                torch.cuda.mem_get_info(device)[0],
            )
        if gpu_gib is not None:
            free[name] = min(free[name], round(gpu_gib * 2**30) - CONTEXT - taken)
    return free


def limit(gpus: Gpus, gpu_gib: float | None) -> None:
    """Lets this process take no more than so much of each GPU; None: all of it again."""
    for device in gpus.values():
        if device.type == "cuda":
            whole = torch.cuda.get_device_properties(device).total_memory
            share = 1.0 if gpu_gib is None else (gpu_gib * 2**30 - CONTEXT) / whole
            torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, share)), device)
