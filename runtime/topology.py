"""The machine that the pool runs on: usable cores, NUMA nodes, memory, huge pages."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_NODES = Path("/sys/devices/system/node")
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True)
class Topology:
    """What threads and memory have to work with. Construct one by hand to test another machine.

    Attributes:
        cores: logical CPUs that this process may run on, ascending (affinity).
        cpu_quota: CPUs' worth of time that the cgroup grants, infinity if unlimited.
        nodes: logical CPUs of each NUMA node.
        memory_total, memory_available: bytes, the cgroup's limit included.
        huge_pages: transparent huge page mode: "always", "madvise", "never" or "unknown".
    """

    cores: tuple[int, ...]
    cpu_quota: float
    nodes: tuple[tuple[int, ...], ...]
    memory_total: int
    memory_available: int
    huge_pages: str

    @property
    def usable(self) -> int:
        """Threads that can run at once: affinity and quota both count; at least 1."""
        return max(1, min(len(self.cores), math.ceil(min(self.cpu_quota, len(self.cores)))))

    @classmethod
    def detect(cls) -> Topology:
        """This machine, now."""
        cores = tuple(sorted(os.sched_getaffinity(0)))
        total, available = _memory()
        return cls(cores, _cpu_quota(), _nodes(cores), total, available, _huge_pages())


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _cpu_quota() -> float:
    """CPUs of cgroup v2's ``cpu.max`` or v1's ``cpu.cfs_quota_us``."""
    if text := _read(_CGROUP / "cpu.max"):
        quota, period = text.split()
        return math.inf if quota == "max" else int(quota) / int(period)
    quota_us = _read(_CGROUP / "cpu/cpu.cfs_quota_us")
    period_us = _read(_CGROUP / "cpu/cpu.cfs_period_us")
    if quota_us and period_us and int(quota_us) > 0:
        return int(quota_us) / int(period_us)
    return math.inf


def _memory() -> tuple[int, int]:
    """(total, available) bytes: the machine's, or less where a cgroup limits us."""
    machine = psutil.virtual_memory()
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = _read(_CGROUP / limit_file), _read(_CGROUP / used_file)
        if limit and used and limit != "max" and int(limit) < machine.total:
            free = int(limit) - int(used) + _reclaimable(used_file)
            return int(limit), min(machine.available, free)
    return machine.total, machine.available


def _reclaimable(used_file: str) -> int:
    """Page cache that the cgroup is charged for and gives up under pressure."""
    stat = _read((_CGROUP / used_file).parent / "memory.stat") or ""
    found = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
    return int(found[1]) if found else 0


def _nodes(cores: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    found = []
    for path in sorted(_NODES.glob("node[0-9]*"), key=lambda p: int(p.name[4:])):
        listed = _parse_cpu_list(_read(path / "cpulist") or "")
        if mine := tuple(cpu for cpu in listed if cpu in cores):
            found.append(mine)
    return tuple(found) or (cores,)


def _parse_cpu_list(text: str) -> list[int]:
    """ "0-3,8" -> [0, 1, 2, 3, 8]."""
    cpus: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cpus += range(int(first), int(last or first) + 1)
    return cpus


def _huge_pages() -> str:
    chosen = re.search(r"\[(\w+)\]", _read(_THP) or "")
    return chosen[1] if chosen else "unknown"
