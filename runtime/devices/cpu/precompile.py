"""A second process that compiles kernels into the cache beside this one, the first time.

Compiling holds Python's lock, so threads would not help. The process takes what this one comes to
last, attention and sampling; whatever is in the cache when it is needed is loaded from there, and
what is not is compiled here as ever: nothing waits, and nothing depends on the other process.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Collection

from pykernels.cpu.jit import cache_folder

Heads = tuple[int, int]
"""Numbers of a key and of a value of one head."""


def begin(heads: Collection[Heads]) -> None:
    """Starts the process, unless these kernels were compiled before or there is one core only."""
    wanted = [head for head in sorted(heads) if not _done(head)]
    if not wanted or len(os.sched_getaffinity(0)) < 2:
        return
    numbers = [str(number) for head in wanted for number in head]
    with contextlib.suppress(OSError):  # no memory for a process: compiled here then
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, *numbers],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it: what it compiles stays of use
        )
        _started.append(process)


_started: list[subprocess.Popen[bytes]] = []


def _done(head: Heads) -> bool:
    return (cache_folder() / _name(head)).exists()


def _name(head: Heads) -> str:
    return f"engine-{head[0]}-{head[1]}"


def main(numbers: list[str]) -> None:
    """Compiles for these heads: D_K D_V D_K D_V ..."""
    from pykernels.cpu.attention.kernel import make_attention
    from pykernels.cpu.router import make_router
    from pykernels.cpu.sampling import make_ops

    heads = list(zip(map(int, numbers[::2]), map(int, numbers[1::2]), strict=True))
    for D_K, D_V in heads:
        make_attention(D_K, D_V)
    make_ops()
    make_router()
    for head in heads:
        (cache_folder() / _name(head)).touch()


if __name__ == "__main__":
    main(sys.argv[1:])
