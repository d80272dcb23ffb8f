"""Permission to use AMX: Linux gives a process the tile state only on request."""

from __future__ import annotations

import ctypes
import functools

from .errors import PykernelsError

_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


@functools.cache
def request_permission() -> None:
    """Asks once for every thread of this process, those to come included.

    Raises:
        PykernelsError: the system says no.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) != 0:
        raise PykernelsError(
            f"Linux refuses this process the AMX tiles (errno {ctypes.get_errno()})",
            "Use Linux 5.16 or newer, no sandbox that forbids arch_prctl, or kernel avx512",
        )
