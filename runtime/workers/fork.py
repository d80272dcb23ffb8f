"""What a forked child may not use: threads do not survive a fork, so nobody would answer it.

Nor do the threads of OpenMP, in which torch computes: the next large tensor waits for them for ever
in a child whose parent had some. One thread alone asks nobody.
"""

from __future__ import annotations

import os
import warnings

import torch

from pykernels.errors import PykernelsError

_settled = os.getpid()


def settle_in_child() -> None:
    """Makes torch compute in one thread in a process that was forked after this module's import.

    Called before torch is needed there, by what makes threads anew; once a process.
    """
    global _settled
    if os.getpid() == _settled:
        return
    _settled = os.getpid()
    torch.set_num_threads(1)
    warnings.warn(
        "torch computes in one thread, because this process was forked, and those of OpenMP do not"
        " survive that; a process that is started with 'spawn' has all of them",
        stacklevel=3,
    )


def refuse_in_child(owner: int, what: str) -> None:
    """Raises PykernelsError in any process but the one with the id ``owner``.

    Args:
        what: has threads in that process: "the engine".
    """
    if os.getpid() != owner:
        raise PykernelsError(
            f"{what} belongs to the parent process; threads do not survive a fork",
            "Make it in the process that uses it, or start that with 'spawn'",
        )
