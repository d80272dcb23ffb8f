"""Whether a GPU's kernels reach another GPU's memory, and what lets them.

Source: CUDA driver API, "Peer Context Memory Access".
"""

from __future__ import annotations

import ctypes
import functools
import os

import torch

from ...env import env

_NATIVE_ATOMIC_SUPPORTED = 3
"""CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED."""
_ALREADY = 704
"""CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED."""


def enable(device: torch.device, peer: torch.device) -> str | None:
    """Lets launches on ``device`` load and store the memory of ``peer``, from now on.

    Returns:
        None, or the reason why they cannot.
    """
    if env.peer_access == "off":
        return "PYKERNELS_PEER_ACCESS=off"
    if device.type != "cuda":  # in Triton's interpreter all is main memory
        return None
    allocator = (
        os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    )
    if any("expandable_segments:True" in text for text in allocator):  # mapped for one GPU alone
        return "PyTorch's allocator has expandable_segments:True"
    if not torch.cuda.can_device_access_peer(device, peer):
        return f"the driver lets {device} not reach {peer}"
    return _enabled(device, peer)


def has_atomics(device: torch.device, peer: torch.device) -> bool:
    """Whether an atomic of ``device`` on the memory of ``peer``, which it reaches, is one: over
    NVLink, as a rule, and not over PCIe."""
    if device.type != "cuda":
        return True
    driver, value = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    failed = driver.cuDeviceGetP2PAttribute(
        ctypes.byref(value), _NATIVE_ATOMIC_SUPPORTED, device.index, peer.index
    )
    return not failed and bool(value.value)


@functools.cache  # once a process: the driver refuses a second time
def _enabled(device: torch.device, peer: torch.device) -> str | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"there is no CUDA driver: {error}"
    driver.cuDevicePrimaryCtxRetain.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int]
    driver.cuCtxEnablePeerAccess.argtypes = [ctypes.c_void_p, ctypes.c_uint]
    number, context = ctypes.c_int(), ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # makes its context the current one
        failed = (
            driver.cuDeviceGet(ctypes.byref(number), peer.index)
            or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)
            or driver.cuCtxEnablePeerAccess(context, 0)
        )
    return None if failed in (0, _ALREADY) else f"cuCtxEnablePeerAccess failed with {failed}"
