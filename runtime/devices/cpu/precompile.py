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

Heads = tuple[int, int, int]
"""Numbers of a key and of a value of one head, and of the key's those in E4M3."""


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
    return f"engine-{'-'.join(map(str, head))}"


def main(numbers: list[str]) -> None:
    """Compiles for these heads: D_K D_V codes D_K D_V codes ..."""
    from pykernels.cpu.attention.kernel import make_attention
    from pykernels.cpu.router import make_router
    from pykernels.cpu.sampling import make_ops

    sizes = [int(number) for number in numbers]
    heads = list(zip(sizes[::3], sizes[1::3], sizes[2::3], strict=True))
    for D_K, D_V, codes in heads:
        make_attention(D_K, D_V, codes=codes)
    make_ops()
    make_router()
    for head in heads:
        (cache_folder() / _name(head)).touch()


if __name__ == "__main__":
    main(sys.argv[1:])
