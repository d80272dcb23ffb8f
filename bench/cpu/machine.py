"""Where and with what a run was made."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from bench.peers.catalog import ROOT
from pykernels import __version__
from pykernels.target import Target
from runtime.machine import tuning
from runtime.machine.topology import Topology


def slug(cpu: str, cores: int) -> str:
    """A folder's name: "AMD EPYC (znver5)", 2 -> "amd-epyc-znver5-2-cores"."""
    plain = re.sub(r"\((r|tm)\)", "", cpu.lower())
    return tuning.slug(f"{plain} {cores} cores")


def describe(target: Target) -> dict[str, Any]:
    """CPU, memory and versions, flat enough for JSON."""
    topology = Topology.detect()
    packages = ("numba", "llvmlite", "torch", "numpy")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": target.cpu,
        "cores": topology.usable,
        "slug": slug(target.cpu, topology.usable),
        "isa": sorted(target.isa),
        "l3_bytes": target.l3,
        "memory_bytes": topology.memory_total,
        "huge_pages": topology.huge_pages,
        "load_before": round(os.getloadavg()[0], 2),
        "versions": {
            "pykernels": commit() or __version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in packages},
        },
    }


def commit() -> str | None:
    """The checkout's commit, with a + if kernels or machinery differ from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True)
        if head.returncode:
            return None
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "pykernels", "runtime"])
    except OSError:
        return None
    return head.stdout.decode().strip() + ("+" if changed.returncode else "")
