"""The kernels' cache on disk: the linker must not mix up what several processes put there."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from numba.core import caching

from pykernels.cpu.cache import files
from pykernels.cpu.jit import routine
from pykernels.env import env
from pykernels.errors import PykernelsError

ROOT = Path(__file__).parents[2]
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
        variables = {"PYKERNELS_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
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
    save, handler, saved = files._KernelCache.save_overload, signal.getsignal(signal.SIGINT), []

    def interrupted(self, sig, data):
        signal.raise_signal(signal.SIGINT)
        saved.append(save(self, sig, data))

    monkeypatch.setattr(files._KernelCache, "save_overload", interrupted)
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


PACKAGE = {
    "parts/__init__.py": "",
    "parts/leaf.py": "from pykernels.cpu.jit import inlined\n\n@inlined\ndef leaf(x): return x\n",
    "parts/user.py": "from .leaf import leaf\n\ndef user(x): return leaf(x)\n",
    "parts/other.py": "def other(x): return x\n",
    "tile.py": "from pykernels.cpu.jit import inlined\n\n@inlined\ndef tile(x): return x\n",
    "parts/factory.py": "def make(tile, n):\n    return lambda x: tile(x) + n\n",
    "keys.py": """
import json
from parts.factory import make
from parts.other import other
from parts.user import user
from pykernels.cpu.cache.key import key_of
from tile import tile
functions = {"user": user, "other": other, "made": make(tile, 1), "other number": make(tile, 2)}
print(json.dumps({name: key_of(function, "") for name, function in functions.items()}))
""",
}


def test_an_edit_changes_the_keys_of_what_it_is_part_of_alone(tmp_path: Path) -> None:
    """What a file imports, and what a factory is handed; not where the folder is."""

    def keys(folder: str, **edited: str) -> dict[str, str]:
        for name, text in PACKAGE.items():
            file = tmp_path / folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + edited.get(file.stem, ""))
        variables = {"PYKERNELS_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(tmp_path / folder / "keys.py")]
        done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    before = keys("a")
    assert None not in before.values() and len(set(before.values())) == len(before)
    assert keys("b") == before
    for edited, changed in (("leaf", {"user"}), ("tile", {"made", "other number"})):
        after = keys("a", **{edited: "# edited\n"})
        assert {name for name in before if after[name] != before[name]} == changed


def test_a_file_that_changed_after_it_was_imported_is_not_kept(tmp_path, monkeypatch) -> None:
    """Its text is no longer what was compiled: the next process would run the old one."""
    (tmp_path / "edited_later.py").write_text("def plus(x):\n    return x + 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    plus = importlib.import_module("edited_later").plus
    with env.override(cache_dir=tmp_path / "cache"):
        assert routine(1, "edited")(plus).ctypes(5) == 6
    assert not [*tmp_path.rglob("*.nb*")]


def test_kernels_unused_for_a_month_are_deleted(tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"
    folders = {name: tmp_path / name for name in ("0" * 16, "1" * 16, "notes")}
    for folder in (kernels, *folders.values()):
        folder.mkdir()
    old, new = ([kernels / f"{name}.{end}" for end in ("nbi", "1.nbc")] for name in ("a[m1]", "b"))
    for file in (*old, *new):
        file.touch()
    for path in (*old, folders["0" * 16], folders["notes"]):
        os.utime(path, (0, time.time() - 1.1 * files.MONTH))
    with env.override(cache_dir=tmp_path):
        assert build() == 6
    assert not any(file.exists() for file in old) and all(file.exists() for file in new)
    assert [name for name, folder in folders.items() if folder.exists()] == ["1" * 16, "notes"]
