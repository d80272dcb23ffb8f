"""The kernels' cache on disk: the linker must not mix up what several processes put there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LONG = "\n        ".join(f"x = (x ^ (x >> {i % 7 + 1})) * {2 * i + 3} + n" for i in range(80))
FACTORY = f"""
import ctypes, sys
from pykernels.cpu.jit import kernel, routine

def make(n):
    @kernel(f"long-{{n}}")
    def long(x):  # too long to be inlined: so it is called by its symbol
        {LONG}
        return x

    @routine(1, f"ends-in-{{n}}")
    def ends(x):
        return long(x) + long(x + 1)
    return ends

for n in map(int, sys.argv[1:]):
    print(ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(make(n).address)(5))
"""


def test_functions_of_one_factory_cached_by_two_processes_stay_apart(tmp_path: Path) -> None:
    """Numba numbers them in each process anew: both are the same-numbered ``long`` of ``make``."""
    script = tmp_path / "factory.py"
    script.write_text(FACTORY)
    root = Path(__file__).parent.parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "PYKERNELS_CACHE_DIR": str(tmp_path)}

    def run(*numbers: str) -> list[str]:
        command = [sys.executable, str(script), *numbers]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.split()

    one, two = run("1"), run("2")
    assert one != two
    assert run("1", "2") == one + two
