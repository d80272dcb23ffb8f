"""Compiles kernels for a GPU that need not be there, through their own launchers.

Each test file of this folder may have ``COMPILES``, a list of (name, call): calls of launchers with
tensors on the device "meta", of any size. Every launch that they make is compiled for the asked
capability instead, with the arguments' own types and alignments, and the plan of that GPU. It holds
each kernel and each format once; other shapes of their plans are in ``COMPILES_ON_A_GPU``, and take
the option --all.

    python -m tests.gpu.compiles --arch 90 tests.gpu.moe.test_router ...

prints one JSON object a launch: registers, stack (spills), shared memory. ``launch`` is patched
before any kernel's module is imported. Files are dealt out to --jobs processes.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

from pykernels.errors import PykernelsError
from pykernels.gpu.common import launch

ROOT = Path(__file__).parents[2]
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")
_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}
_NAMED = {str(dtype).removeprefix("torch."): name for dtype, name in _TYPES.items()}


def described(arg: Any) -> tuple[str, bool]:
    """Triton's type of a run-time argument, and whether it is a multiple of 16."""
    if isinstance(arg, torch.Tensor):
        return f"*{_TYPES[arg.dtype]}", True
    if hasattr(arg, "block_shape"):  # a host descriptor of the tensor memory accelerator
        layout = f",{arg.layout!r}" if hasattr(arg, "layout") else ""  # Gluon's
        return f"tensordesc<{_TYPES[arg.base.dtype]}{list(arg.block_shape)}{layout}>", False
    if hasattr(arg, "dtype") and hasattr(arg, "base"):  # triton.reinterpret of a tensor
        return f"*{_NAMED.get(str(arg.dtype), str(arg.dtype))}", True
    if isinstance(arg, bool):
        return "i1", False
    if isinstance(arg, int):
        return ("i32" if -(2**31) <= arg < 2**31 else "i64"), arg % 16 == 0
    if isinstance(arg, float):
        return "fp32", False
    raise PykernelsError(f"a launch has an argument {arg!r}", "Teach compiles.py its type")


def source(kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ASTSource:
    """What Triton's own launch would compile."""
    bound = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    constants, signature, attrs = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = bound.get(parameter.name, parameter.default)
        one = isinstance(value, int) and not isinstance(value, bool) and value == 1
        if parameter.is_constexpr or value is None or (one and not parameter.do_not_specialize):
            constants[(i,)], signature[parameter.name] = value, "constexpr"
            continue
        signature[parameter.name], aligned = described(value)
        if aligned and not parameter.do_not_specialize:
            attrs[(i,)] = [["tt.divisibility", 16]]
    maker = GluonASTSource if kernel.is_gluon() else ASTSource
    return maker(kernel, signature, constants, attrs)


@functools.cache  # several calls may make one launch
def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread and bytes of stack, from the cuobjdump that Triton brings."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return {"registers": int(found[1]), "stack": int(found[2])} if found else {}


_LAYOUT = re.compile(r"^#(linear\d*) = #ttg.linear<\{.*?lane = (\[\[.*?\]\]|\[\]), warp", re.M)
_REDUCE = re.compile(r'"tt\.reduce".*?<\{axis = (\d+) : i32\}>.*?\}\) : \((.*?)\) ->', re.S)


def mixed_rows(ttgir: str) -> str | None:
    """The first reduction that Triton 3.6 gets wrong, if any.

    It shuffles among adjacent lanes; a layout that a reshape left behind may hold a row's elements
    in lanes apart, with other rows' between them.
    """
    lanes = {name: json.loads(bases) for name, bases in _LAYOUT.findall(ttgir)}
    for axis, operands in _REDUCE.findall(ttgir):
        found = re.search(r"#(linear\d*)>", operands)
        if found is None:
            continue
        dims, kept = [int(d) for d in re.findall(r"slice<\{dim = (\d+)", operands)], int(axis)
        for dim in reversed(dims):  # an axis of a slice is one of what was sliced
            kept += kept >= dim
        along = [i for i, basis in enumerate(lanes[found[1]]) if basis[kept]]
        if along and along[-1] - along[0] + 1 != len(along):
            return f"a reduction over lanes {along} of {operands[:200]}"
    return None


def pretend(arch: int) -> None:
    """From now on there is a GPU of this compute capability, as far as plans and checks go.

    Raises:
        PykernelsError: Triton would interpret.
    """
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise PykernelsError("TRITON_INTERPRET is set", "Unset it")
    launch.supports = lambda device: None
    launch.arch = lambda device: divmod(arch, 10)


def launches(call: Callable[[], object]) -> list[tuple[JITFunction, tuple, dict[str, Any]]]:
    """The kernels that a call would launch, with their arguments; none is launched."""
    found = []

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.append((self, args, kwargs))

    JITFunction.run = record
    call()
    return found


def compiled(calls: list[tuple[str, Any]], arch: int) -> Iterator[dict[str, Any]]:
    """One row a launch of the calls; ``why`` where one did not compile."""
    for name, call in calls:
        try:
            found = launches(call)
        except Exception as error:
            yield {"name": name, "why": f"{type(error).__name__}: {error}"}
            continue
        for kernel, args, kwargs in found:
            options = {k: kwargs.pop(k) for k in OPTIONS if k in kwargs}
            row: dict[str, Any] = {"name": name, "kernel": kernel.__name__, **options}
            try:
                made = triton.compile(
                    source(kernel, args, kwargs), GPUTarget("cuda", arch, 32), options
                )
                row |= {"shared": made.metadata.shared, **resources(made.asm["cubin"])}
                if mixed := mixed_rows(made.asm["ttgir"]):
                    row["why"] = mixed
            except Exception as error:
                row["why"] = " ".join(f"{type(error).__name__}: {error}".split())[-400:]
            yield row


def tables(every: bool = False) -> dict[str, list[tuple[str, Any]]]:
    """The calls of each test file that has any, by its module."""
    found = {}
    for path in sorted(Path(__file__).parent.rglob("test_*.py")):
        if "\nCOMPILES = " in path.read_text():
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[module] = calls_of(module, every)
    return found


def calls_of(module: str, every: bool) -> list[tuple[str, Any]]:
    found = importlib.import_module(module)
    return [*found.COMPILES, *(getattr(found, "COMPILES_ON_A_GPU", []) if every else [])]


def rows_of(module: str, arch: int, every: bool) -> list[dict[str, Any]]:
    return [{"module": module, **row} for row in compiled(calls_of(module, every), arch)]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("modules", nargs="+")
    chosen = parser.parse_args()
    pretend(chosen.arch)
    failed, one = False, functools.partial(rows_of, arch=chosen.arch, every=chosen.all)
    # Forked: torch is imported once for all, which takes as long as a file.
    forked = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(chosen.jobs, mp_context=forked) as pool:
        for rows in pool.map(one, chosen.modules):
            for row in rows:
                print(json.dumps(row), flush=True)
                if "why" in row:  # again, where a failed test shows them
                    print(json.dumps(row), file=sys.stderr, flush=True)
                    failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
