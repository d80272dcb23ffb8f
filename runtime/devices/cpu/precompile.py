"""A second process that compiles kernels into the cache beside this one, the first time.

Compiling holds Python's lock, so threads would not help. The process takes what this one comes to
last: attention, sampling, and what only long prompts need. Whatever is in the cache when it is
needed is loaded from there, and what is not is compiled here as ever: nothing waits, and nothing
depends on the other process.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Collection
from dataclasses import astuple
from pathlib import Path

from pykernels.cpu.attention.expanded import Expanded
from pykernels.cpu.cache import files
from pykernels.cpu.cache.key import key_of_modules

Heads = tuple[int, int, int]
"""Numbers of a key and of a value of one head, and of the key's those in E4M3."""

_KINDS = "attention", "expanded"
"""What is compiled, in this order; each has sizes."""


def begin(heads: Collection[Heads], expanded: Collection[Expanded] = ()) -> None:
    """Starts the process, unless these kernels were compiled before or there is one core only."""
    sizes = sorted(heads), sorted(astuple(each) for each in expanded)
    wanted = [
        (kind, *each)
        for kind, some in zip(_KINDS, sizes, strict=True)
        for each in some
        if not _mark(kind, *each).exists()
    ]
    if not wanted or len(os.sched_getaffinity(0)) < 2:
        return
    with contextlib.suppress(OSError):  # no memory for a process: compiled here then
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(wanted)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it: what it compiles stays of use
        )
        _started.append(process)


_started: list[subprocess.Popen[bytes]] = []


def _mark(kind: str, *sizes: int) -> Path:
    """The file that marks it as compiled from this source."""
    name = "-".join((kind, *(str(int(size)) for size in sizes), _key()))
    return files.kernels_folder() / f"{name}{files.MARK}"


@functools.cache
def _key() -> str:
    folder = Path(files.__file__).parents[1]
    made = ("attention/kernel.py", "attention/expanded.py", "router.py", "sampling/__init__.py")
    return key_of_modules(*(folder / name for name in made))


def main(wanted: str) -> None:
    """Compiles: JSON of [[kind, its sizes ...] ...]."""
    from pykernels.cpu.attention.kernel import make_attention
    from pykernels.cpu.router import make_router
    from pykernels.cpu.sampling import make_ops

    groups = {kind: [sizes for of, *sizes in json.loads(wanted) if of == kind] for kind in _KINDS}
    for D_K, D_V, codes in groups["attention"]:
        make_attention(D_K, D_V, codes=codes)
    make_ops()
    make_router()
    for sizes in groups["attention"]:
        _mark("attention", *sizes).touch()
    for sizes in groups["expanded"]:
        Expanded(*sizes).compile()
        _mark("expanded", *sizes).touch()


if __name__ == "__main__":
    main(sys.argv[1])
