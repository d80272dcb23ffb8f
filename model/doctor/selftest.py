"""The doctor's self-test: which kernels are tried, and where."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

from runtime.machine.topology import Topology

from .report import Fact
from .result import result_fact
from .side_by_side import Case, tried_side_by_side

COMMON = ("bf16", "fp8", "int4-g128", "mxfp4", "q4_k", "q6_k", "q8_0")
"""Formats that are tried even if nothing of them was compiled before: those of most checkpoints. A
format takes ten seconds to compile, so all of them take minutes."""


def look_at_results(every: bool, progress: Callable[[str], None]) -> Iterator[Fact]:
    """A tiny MoE layer in the common formats, and in those that were compiled before, on the kernel
    that each gets here, against the float32 reference; with ``every`` in all formats, on all
    kernels that this CPU can run.

    Those that were never compiled are tried side by side in processes, in the order in which they
    are ready.

    Args:
        progress: called with what is under way.
    """
    cases = list(_cases(every))
    if not every:
        tried = [case for case in cases if case[0] in COMMON or _mark(*case).exists()]
        if left := [fmt for fmt, kernel in cases if (fmt, kernel) not in tried]:
            yield Fact(f"{len(left)} other formats", "not compiled yet; --all tries them (minutes)")
        cases = tried
    new = [case for case in cases if not _mark(*case).exists()]
    with_processes = new if len(new) > 1 and Topology.detect().usable > 1 else []
    for fmt, kernel in cases:
        if (fmt, kernel) not in with_processes:
            progress(f"{fmt} on {kernel}")
            yield result_fact(fmt, kernel)
            _mark(fmt, kernel).touch()
    for (fmt, kernel), fact in tried_side_by_side(with_processes, progress):
        yield fact
        if not fact.problem:
            _mark(fmt, kernel).touch()


def _cases(every: bool) -> Iterator[Case]:
    from pykernels.quant import FORMATS
    from pykernels.registry import kernels, resolve
    from pykernels.target import detect

    target = detect()
    for fmt in FORMATS:
        if every:
            able = [each.name for each in kernels() if each.supports(fmt, target) is None]
        else:
            able = [resolve("auto", fmt, target).name]
        yield from ((fmt, kernel) for kernel in able)


def _mark(fmt: str, kernel: str) -> Path:
    """The file that says that this was compiled from this source."""
    from pykernels.cpu.cache import files

    return files.kernels_folder() / f"tried-{fmt}-{kernel}-{_key(kernel)}{files.MARK}"


@functools.cache
def _key(kernel: str) -> str:
    from pykernels import cpu
    from pykernels.cpu.cache.key import key_of_modules
    from pykernels.registry import get_backend

    build = get_backend(kernel).build
    module = build.partition(":")[0] if isinstance(build, str) else build.__module__
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return key_of_modules(Path(cpu.__file__), Path(spec.origin))
