"""Bring mapped files into memory: at the disk's speed, or at once where they are there already."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence

import torch

from pykernels.env import env

from ..tensors.ahead import ahead
from .mapped import MappedFile

_CHUNK = 8 << 20
_MADV_POPULATE_READ = 22  # Linux 5.14


def populate(files: Sequence[MappedFile], report: Callable[[int], None]) -> None:
    """Maps every page of the files, reading those that are not in memory.

    On several threads. Mappings that ask for huge pages are read 2 MiB at a time, into huge pages
    where the file system has them (Linux 6.16: ext4, XFS, btrfs); others are read ahead first, as
    faults alone would read 128 KiB at a time.

    Args:
        report: called with the bytes of what is there.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for file in files:
        memory = file.memory
        with file.path.open("rb") as stream:
            descriptor = stream.fileno()

            def one(i: int, memory: torch.Tensor = memory, descriptor: int = descriptor) -> int:
                part = memory[i * _CHUNK : (i + 1) * _CHUNK]
                if not env.hugepages:
                    os.posix_fadvise(descriptor, i * _CHUNK, len(part), os.POSIX_FADV_WILLNEED)
                address, length = ctypes.c_void_p(part.data_ptr()), ctypes.c_size_t(len(part))
                if libc.madvise(address, length, _MADV_POPULATE_READ):
                    int(part[:: mmap.PAGESIZE].sum())  # a kernel that does not know it
                return len(part)

            for length in ahead(one, -(-memory.nbytes // _CHUNK), _CHUNK):
                report(length)


def resident(memory: torch.Tensor) -> int:
    """Bytes of a mapped file, uint8 from its beginning, that are in memory, whoever read them."""
    libc = ctypes.CDLL(None, use_errno=True)
    in_memory = torch.zeros(-(-memory.nbytes // mmap.PAGESIZE), dtype=torch.uint8, device="cpu")
    arguments = (memory.data_ptr(), memory.nbytes, in_memory.data_ptr())
    if libc.mincore(*map(ctypes.c_void_p, arguments)):
        return 0
    return min(memory.nbytes, int((in_memory & 1).sum()) * mmap.PAGESIZE)
