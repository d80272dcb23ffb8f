"""Memory for weights: huge pages, zeroed, page-aligned, on the NUMA node that reads it.

A stream of packed weights on 4 KiB pages misses the TLB every 64 lines; on 2 MiB pages it runs at
the read roof. Transparent huge pages are asked for with ``madvise``, and once more when the weights
are there (``collapse``), as memory may have been in pieces before; where they are off or not
known to the kernel, the memory is plain, and ``pykernels doctor`` says so.

Placement is ``mbind`` before the first touch (man 2 mbind): SOSP'25 section 3.3, each socket stores
its own slice. What every node's workers read alike (the KV cache, embeddings) is interleaved: its
pages take turns on the nodes, so all memory controllers serve it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import math
import mmap
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from pykernels.env import env
from pykernels.errors import PykernelsError

HUGE_PAGE = 2 << 20

_SYSCALLS = {"x86_64": (237, 239, 279), "aarch64": (235, 236, 239)}
"""Numbers of mbind, get_mempolicy and move_pages."""
_MADV_COLLAPSE = 25
_SERIAL = 1 << 15
"""Numbers below which torch works on the calling thread alone."""
_MPOL_BIND, _MPOL_INTERLEAVE = 2, 3
_MPOL_F_ADDR = 2
_MAX_NODES = 1024


def allocate(
    nbytes: int, node: int | None = None, interleaved: Sequence[int | None] = ()
) -> torch.Tensor:
    """uint8 [nbytes] of zeros on huge pages, its address a multiple of 2 MiB.

    Less than one such page is on plain ones: its first byte would take 2 MiB. The memory is freed
    with the last view of the tensor.

    Args:
        node: NUMA node that all pages will be on; None for wherever they are touched first.
        interleaved: nodes that pages will be on in turns; None among them: made up, not bound.

    Raises:
        PykernelsError: the system refuses that much address space, or to bind it to the node.
    """
    large = nbytes >= HUGE_PAGE
    try:
        # Private: shared memory is shmem, which gets no huge pages on most systems.
        size = nbytes + HUGE_PAGE if large else max(1, nbytes)
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError):
        raise PykernelsError(
            f"the system refuses {nbytes / 2**30:.1f} GiB for weights",
            "Free memory, raise the limit (ulimit -v), or take a smaller model or format",
        ) from None
    if large and env.hugepages:
        with contextlib.suppress(OSError):  # a kernel without them refuses
            region.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    if node is not None:
        _bind(whole.data_ptr(), len(region), _MPOL_BIND, [node])
    elif known := [number for number in interleaved if number is not None]:
        _bind(whole.data_ptr(), len(region), _MPOL_INTERLEAVE, known)
    skip = -whole.data_ptr() % HUGE_PAGE if large else 0
    return whole[skip : skip + nbytes]


def allocate_side_by_side(sizes: Sequence[int], nodes: Sequence[int | None]) -> torch.Tensor:
    """uint8 [sum of sizes] as of ``allocate``, in parts that are each on a node; a page that two
    parts share is on the node of the first.

    Args:
        nodes: of each part; None for wherever it is touched first.

    Raises:
        PykernelsError: as ``allocate``.
    """
    whole = allocate(sum(sizes))
    page, at = mmap.PAGESIZE, whole.data_ptr()
    start = at // page * page
    for size, node in zip(sizes, nodes, strict=True):
        at += size
        end = -(-at // page) * page
        if node is not None and end > start:
            _bind(start, end - start, _MPOL_BIND, [node])
        start = max(start, end)
    return whole


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU, made on this thread: torch clears large ones with threads of its own, which
    would wait for the cores of a pool's workers."""
    if (count := math.prod(shape)) < _SERIAL:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    return allocate(count * dtype.itemsize).view(dtype).view(*shape)


def collapse(memory: torch.Tensor) -> None:
    """Puts pages that are there into huge ones, where ``allocate`` asked for them and got others
    (MADV_COLLAPSE, Linux 6.1). A system that does not know it, or has no whole ones, leaves them.
    """
    if memory.nbytes < HUGE_PAGE or not env.hugepages:
        return
    first = memory.data_ptr() // HUGE_PAGE * HUGE_PAGE
    length = memory.data_ptr() + memory.nbytes - first
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_COLLAPSE)


def huge_bytes(memory: torch.Tensor) -> int:
    """Bytes of a tensor that lie in huge pages, from /proc/self/smaps; 0 where it does not say.

    A mapping that holds more than the tensor counts up to the tensor's part of it.
    """
    start, end, huge, overlap = memory.data_ptr(), memory.data_ptr() + memory.nbytes, 0, 0
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, last = (int(at, 16) for at in bounds.groups())
            overlap = max(0, min(end, last) - max(start, first))
        elif overlap and line.startswith("AnonHugePages:"):
            huge += min(overlap, int(line.split()[1]) << 10)
    return huge


def policy_node(memory: torch.Tensor) -> int | None:
    """The one node that a tensor's memory is bound to; None if it is not bound to one.

    Raises:
        PykernelsError: the system call is refused.
    """
    mode, mask = ctypes.c_int(-1), _node_mask()
    _call(1, ctypes.byref(mode), mask, _MAX_NODES, memory.data_ptr(), _MPOL_F_ADDR)
    nodes = [n for n in range(_MAX_NODES) if mask[n // 64] >> n % 64 & 1]
    return nodes[0] if mode.value == _MPOL_BIND and len(nodes) == 1 else None


def page_nodes(memory: torch.Tensor, addresses: Sequence[int] | None = None) -> set[int]:
    """The nodes that pages of a tensor lie on: those at ``addresses``, by default all pages.

    A page that was never touched lies nowhere and counts as its errno, -2.
    """
    page, start = mmap.PAGESIZE, memory.data_ptr()
    found = addresses or range(start // page * page, start + memory.nbytes, page)
    pages = (ctypes.c_void_p * len(found))(*found)
    status = (ctypes.c_int * len(found))()
    _call(2, 0, len(found), pages, None, status, 0)
    return set(status)


@functools.cache
def binding_problem(node: int) -> str | None:
    """Why memory cannot be bound to a node, as a clause; None if it can (tried on one page)."""
    try:
        probe = allocate(mmap.PAGESIZE, node)
        probe.fill_(1)
        if policy_node(probe) != node:
            return f"memory bound to node {node} is not there"
    except PykernelsError as error:
        return error.cause
    return None


def _bind(address: int, nbytes: int, policy: int, nodes: Sequence[int]) -> None:
    mask = _node_mask()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    _call(0, address, nbytes, policy, mask, _MAX_NODES, 0)


def _node_mask() -> ctypes.Array[ctypes.c_ulong]:
    return (ctypes.c_ulong * (_MAX_NODES // 64))()


def _call(which: int, *arguments: object) -> None:
    """One of ``_SYSCALLS``; its failure as PykernelsError."""
    machine = platform.machine()
    if machine not in _SYSCALLS:
        raise PykernelsError(
            f"NUMA placement is not known for {machine} processors", "Use --numa off"
        )
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    if syscall(ctypes.c_long(_SYSCALLS[machine][which]), *words) == 0:
        return
    number = ctypes.get_errno()
    name = ("mbind", "get_mempolicy", "move_pages")[which]
    if number in (errno.EPERM, errno.ENOSYS):
        hint = "Use --numa off, or allow it in the container (docker: --cap-add SYS_NICE)"
    else:
        hint = "Use --numa off, or check with numactl --hardware that the node has memory"
    raise PykernelsError(f"the system refuses {name}: {os.strerror(number)}", hint)
