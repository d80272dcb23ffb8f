"""One process at a time writes a folder; the others are told so."""

from __future__ import annotations

import contextlib
import fcntl
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from pykernels.errors import PykernelsError


@contextlib.contextmanager
def one_writer(lock: Path, folder: Path) -> Iterator[None]:
    """Within it no other process is within it for the same lock. The system lets go of the lock of
    a process that is killed.

    Args:
        lock: a file that is made for it, and deleted behind it; its folder is there.
        folder: that is written, for the error.

    Raises:
        PykernelsError: another process is within it, or the lock cannot be made.
    """
    descriptor = _locked(lock, folder)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(lock: Path, folder: Path) -> int:
    while True:
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise PykernelsError(
                f"{lock} cannot be written: {error.strerror}",
                "Check the folder's permissions and the disk",
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise PykernelsError(
                f"another process is writing {folder}", "Wait for its end, or name another folder"
            ) from None
        except OSError as error:  # a network's file system without locks
            warnings.warn(
                f"{folder} cannot be locked ({error.strerror}): let no other process write it now",
                stacklevel=4,
            )
            return descriptor
        # Who had it before may have deleted it since it was opened here: then nobody else sees it.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                return descriptor
        os.close(descriptor)
