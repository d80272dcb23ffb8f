"""Which kernels the rows of ``ops.py`` launch on an H200 that need not be there.

    python -m tests.gpu.launches

prints them, one "module.kernel" a line. It must run without TRITON_INTERPRET.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from pykernels.gpu.common import launch

from .compiles import launches, pretend

KERNELS = Path(launch.__file__).parents[1]
ARCH = 90


def launchable() -> set[str]:
    """What a ``jit`` decorates and some module launches, by the source; other kernels are parts."""
    made, launched = set(), set()
    for path in KERNELS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                if any("jit" in ast.unparse(by) for by in node.decorator_list):
                    made.add((path.stem, node.name))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched.add(ast.unparse(node.func.value).split(".")[-1])  # f[grid](..)
    return {f"{module}.{name}" for module, name in made if name in launched}


def launched_by_rows() -> Iterator[str]:
    """One for each launch of each row; kernels' modules must not have been imported before."""
    pretend(ARCH)
    from .ops import AROUND
    from .ops_attention import ATTENTION
    from .ops_delta_net import DELTA_NET
    from .ops_products import PRODUCTS
    from .ops_ranks import RANKS
    from .ops_step import STEP

    for op in (*AROUND, *PRODUCTS, *ATTENTION, *STEP, *RANKS, *DELTA_NET):
        for kernel, *_ in launches(partial(op.run, op.make(torch.device("meta")))):
            yield f"{kernel.fn.__module__.split('.')[-1]}.{kernel.__name__}"


if __name__ == "__main__":
    print(*sorted(set(launched_by_rows())), sep="\n")
