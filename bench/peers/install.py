"""Makes the virtual environment of each peer that needs one: python -m bench.peers.install

kt-kernel's metadata pins another torch and pulls in a GPU stack, so it is installed without its
dependencies, and the few that its CPU half imports are named here. ``--packages-for 3.12`` makes a
plain folder of pure and binary packages instead (without torch), for a machine that has no network:
its own Python then runs the peer, with the folder on its path.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from bench.peers.catalog import VENVS

KT_KERNEL = ("kt-kernel==0.7.2", "gguf==0.19.0", "compressed-tensors==0.15.0.1")
KT_KERNEL_NEEDS = (
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
)
_KEPT = ("kt_kernel", "kt_kernel.libs", "gguf", "compressed_tensors")
_EXTENSIONS = ("_amx", "_avx512_bf16")  # of kt_kernel's seven builds, those that the peers ask for


def make_venv(folder: Path) -> None:
    """A virtual environment with kt-kernel; nothing to do where it is already that of the pins."""
    stamp, pins = folder / "pins.json", json.dumps([KT_KERNEL, KT_KERNEL_NEEDS])
    if stamp.exists() and stamp.read_text() == pins:
        return
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True, symlinks=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check"]
    subprocess.run([*pip, *KT_KERNEL_NEEDS], check=True)
    subprocess.run([*pip, "--no-deps", *KT_KERNEL], check=True)
    subprocess.run([folder / "bin/python", "-c", "import kt_kernel"], check=True)
    stamp.write_text(pins)


def make_packages(folder: Path, version: str) -> None:
    """A folder of the peer's packages for CPython ``version``, nothing else in it."""
    packages = folder / "packages"
    shutil.rmtree(packages, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]
    chosen = ["--only-binary", ":all:", "--python-version", version, "--target", str(packages)]
    subprocess.run([*pip, *chosen, *KT_KERNEL], check=True)
    for path in packages.iterdir():
        if path.name not in _KEPT and not path.name.endswith(".dist-info"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in (packages / "kt_kernel").glob("_kt_kernel_ext*.so"):
        if not any(f"{end}." in path.name for end in _EXTENSIONS):
            path.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.install", description=__doc__)
    parser.add_argument("--packages-for", metavar="X.Y", help="a folder for that CPython instead")
    options = parser.parse_args()
    folder = VENVS / "kt-kernel"
    try:
        if options.packages_for:
            make_packages(folder, options.packages_for)
        else:
            make_venv(folder)
    except (subprocess.CalledProcessError, OSError) as error:
        print(
            f"error: the peer kt-kernel could not be installed ({error})."
            " Look at pip's lines above; benchmarks run without it and say so.",
            file=sys.stderr,
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
