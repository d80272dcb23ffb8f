"""python -m tests.gpu.hopper_sass [--all]: what ptxas made of Hopper's Gluon kernels.

What they gain hangs on the order of a few instructions, which ptxas may change or, if it sees a
danger, give up: then it waits after every single product and says so to nobody. Prints one JSON
object a kernel: products (HGMMA or QGMMA), waits for them, spills (LDL, STL), the most exponentials
between a wait for all but one group and the next wait, that is, in parallel with products, arrivals
at memory barriers that are loose (``loose_arrivals``); of ``gemv_mma`` how late it loads weights.
Without ``--all`` it compiles each kernel once.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from pykernels.gpu.common import launch

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def counts(sass: str) -> dict[str, int]:
    """Of one kernel's disassembly."""
    products = len(re.findall(r"[HQ]GMMA", sass))
    waits = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x\d", sass)
    upto = [part.split("gsb0, 0x0")[0] for part in re.split(r"gsb0, 0x1", sass)[1:]]
    beside = [len(re.findall(r"MUFU\.EX2", part)) for part in upto]
    spills, most = len(re.findall(r"\b(?:LDL|STL)\b", sass)), max(beside, default=0)
    return {"products": products, "waits": len(waits), "beside": most, "spills": spills}


def loose_arrivals(ptx: str) -> int:
    """How many arrivals do not follow a barrier of the warps that they speak for.

    One thread arrives for all. What the others have read or written in shared memory, or had read
    by products, is ordered before it by a barrier alone. compute-sanitizer's racecheck does not see
    that order and reports all these kernels. A role of one warp has the warp's own barrier.
    """
    ordered, loose = False, 0
    for line in ptx.splitlines():
        if re.search(r"\b(?:bar|barrier|bar\.warp)\.sync\b", line):
            ordered = True
        elif re.search(r"\b(?:ld|st)\.shared|wgmma\.wait_group", line):
            ordered = False
        elif re.search(r"mbarrier\.arrive\.(?!expect_tx)", line):
            loose += not ordered
    return loose


def lateness(sass: str, loads: int) -> float:
    """How late a step asks for the next one's weights, at worst: the share of its own products that
    are in front of a load. Steps have ``loads`` loads each and are written out one by one."""
    events = re.findall(r"LDG\.E\.EF|HMMA", sass)
    steps = events.count("LDG.E.EF") // loads
    products = events.count("HMMA") / steps
    before, asked, late = 0, 0, 0.0
    for event in events:
        if event == "HMMA":
            before += 1
            continue
        step = asked // loads - 1  # the one that should be running
        late = max(late, before / products - max(step, 0))
        asked += 1
    return late


def disassembled(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [str(TOOL), "--dump-sass", file.name], capture_output=True, text=True, check=True
        ).stdout


KERNELS = {
    "prefill_hopper",
    "mla_decode_hopper",
    "gemv_mma",
    "dequant_gemm",
    "gemm_fp8_hopper",
    "gemm_bf16_hopper",
}
FEW = {
    "GQA, pages",
    "MLA, 128 heads",
    "int4 1 7168x7168",
    "int4-g128 2048 7168x7168",
    "fp8 128 2048x7168",
    "bf16 bf16 256",
}
MORE = {
    "GQA, D 128",
    "MLA",
    "MLA, 128 heads, E4M3",
    "int4-g128 2048 18432x7168",
    "int8-channel 2048 7168x7168",
    "fp8 128 18432x7168",
    "int4-g128 1 7168x7168",
    "fp8 fp8 256",
    "int4-g128 bf16 256",
    "q4_k bf16 64",
}


def main() -> None:
    launch.supports = lambda device: None
    launch.arch = lambda device: (9, 0)
    from .compiles import OPTIONS, source, tables

    def compile_it(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if self.__name__ in KERNELS:
            options = {k: kwargs.pop(k) for k in OPTIONS if k in kwargs}
            made = triton.compile(source(self, args, kwargs), GPUTarget("cuda", 90, 32), options)
            sass = disassembled(made.asm["cubin"])
            row = {"kernel": self.__name__, **counts(sass)}
            if self.__name__ == "gemv_mma":
                row["late"] = lateness(sass, loads=4)
            row["loose"] = loose_arrivals(made.asm["ptx"])
            print(json.dumps(row), flush=True)

    JITFunction.run = compile_it
    chosen = FEW | MORE if "--all" in sys.argv else FEW
    for name, call in (row for table in tables("--all" in sys.argv).values() for row in table):
        if name in chosen:
            call()


if __name__ == "__main__":
    sys.exit(main())
