"""The kernels' cache on disk: the linker must not mix up what several processes put there."""

from __future__ import annotations

import ast
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from numba.core import caching

from pykernels.cpu import jit
from pykernels.cpu.jit import routine
from pykernels.env import env
from pykernels.errors import PykernelsError

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


def test_cached_functions_of_one_factory_stay_apart(tmp_path: Path) -> None:
    """Numba numbers them in each process anew: both are the same-numbered ``long`` of ``make``."""
    (tmp_path / "factory.py").write_text(FACTORY)

    def run(*numbers: str) -> list[str]:
        root = str(Path(__file__).parents[2])
        variables = {"PYKERNELS_CACHE_DIR": str(tmp_path), "PYTHONPATH": root}
        done = subprocess.run(
            [sys.executable, str(tmp_path / "factory.py"), *numbers],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    [one], [two, again] = run("1"), run("2", "1")
    assert one == again != two


def build() -> int:
    """A routine that is known by its name, made anew; what it returns for 5."""

    @routine(1, "damaged")
    def plus_one(x):
        return x + 1

    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(plus_one.address)(5)


def test_ctrl_c_waits_until_a_kernel_is_compiled(tmp_path, monkeypatch) -> None:
    """In LLVM's callbacks the exception would be lost, and the kernel not there."""
    save, handler, saved = jit._KernelCache.save_overload, signal.getsignal(signal.SIGINT), []

    def interrupted(self, sig, data):
        signal.raise_signal(signal.SIGINT)
        saved.append(save(self, sig, data))

    monkeypatch.setattr(jit._KernelCache, "save_overload", interrupted)
    with env.override(cache_dir=tmp_path):
        with pytest.raises(KeyboardInterrupt):
            build()
        assert len(saved) == 1 and signal.getsignal(signal.SIGINT) is handler
        assert build() == 6 and len(saved) == 1  # from the cache


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("text", [b"", b"\x80\x04"])
def test_a_damaged_file_is_written_again(ending: str, text: bytes, tmp_path: Path) -> None:
    with env.override(cache_dir=tmp_path):
        assert build() == 6
        (file,) = tmp_path.rglob(f"*.{ending}")
        file.write_bytes(text)
        assert build() == 6 and file.stat().st_size > len(text)


def test_a_read_only_cache_is_read_and_nothing_kept_elsewhere(tmp_path, monkeypatch) -> None:
    """Elsewhere, in ``__pycache__``, code would outlive the edit of a file that it was made of."""

    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    with env.override(cache_dir=tmp_path):
        assert build() == 6
        monkeypatch.setattr(os, "replace", read_only)
        monkeypatch.setattr(caching.tempfile, "TemporaryFile", read_only)
        assert build() == 6
        for file in tmp_path.rglob("*.nbi"):
            file.write_bytes(b"damaged")
        with pytest.raises(PykernelsError, match="be kept in .*: Read-only file system.*CACHE_DIR"):
            build()
    assert not [*Path(__file__).parent.rglob("*.nbi")]


def test_a_function_of_no_file_is_compiled_and_not_kept(tmp_path: Path) -> None:
    """A notebook's cell: nothing tells when it has changed."""
    for number in (1, 2):
        scope: dict = {}
        exec(f"def plus(x):\n    return x + {number}", scope)
        with env.override(cache_dir=tmp_path):
            assert routine(1, "cell")(scope["plus"]).ctypes(5) == 5 + number
    assert not [*tmp_path.rglob("*.nb*")]


def test_what_compiled_code_sees_is_in_the_key() -> None:
    root = Path(jit.__file__).parents[2]
    seen = {file for part in jit.SOURCES for file in ((root / part).rglob("*.py"))}
    seen |= {root / part for part in jit.SOURCES if part.endswith(".py")}
    for file in sorted([*root.glob("pykernels/**/*.py"), *root.glob("runtime/**/*.py")]):
        imports = [
            n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ImportFrom)
        ]
        names = {a.name for n in imports if (n.module or "").endswith("jit") for a in n.names}
        compiles = names & {"inlined", "kernel", "routine", "task"}
        assert file in seen or not compiles, f"{file} compiles, and is not in SOURCES"


def test_a_folder_unused_for_a_month_is_deleted(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in ("0" * 16, "1" * 16, "notes"))
    for folder in (old, new, other):
        folder.mkdir()
        (folder / "file").touch()
    for folder in (old, other):
        os.utime(folder, (0, time.time() - 1.1 * jit.MONTH))
    with env.override(cache_dir=tmp_path):
        here = jit.cache_folder()
    assert set(tmp_path.iterdir()) == {here, new, other}
