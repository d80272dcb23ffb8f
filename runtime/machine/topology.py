"""The machine that the pool runs on: usable cores, NUMA nodes, memory, huge pages."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from pykernels.env import env
from pykernels.errors import PykernelsError

from .cgroup import cpu_quota, memory_limits, read


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node.

    Attributes:
        number: the kernel's; None of a made-up node, whose memory is not bound.
        cores: its logical CPUs that this process may run on, ascending.
        memory_total, memory_free: bytes; 0 where this process may not allocate (cpuset).
    """

    number: int | None
    cores: tuple[int, ...]
    memory_total: int
    memory_free: int


@dataclass(frozen=True)
class Topology:
    """What threads and memory have to work with. Construct one by hand to test another machine.

    Attributes:
        cores: logical CPUs that this process may run on, ascending (affinity, cpuset).
        physical: the same, those of one physical core together: SMT siblings share its units.
        cpu_quota: CPUs' worth of time that the cgroups grant, infinity if unlimited.
        nodes: NUMA nodes with at least one of the cores.
        memory_total, memory_available: bytes, the cgroups' limits included.
        huge_pages: transparent huge page mode: "always", "madvise", "never" or "unknown".
    """

    cores: tuple[int, ...]
    physical: tuple[tuple[int, ...], ...]
    cpu_quota: float
    nodes: tuple[NumaNode, ...]
    memory_total: int
    memory_available: int
    huge_pages: str

    @property
    def usable(self) -> int:
        """Threads that can run at once: affinity and quota both count; at least 1.

        A quota of 2.5 is two: a third thread would run into it, and the kernel stops all of them
        for the rest of every period then.
        """
        return max(1, math.floor(min(self.cpu_quota, len(self.cores))))

    def default_threads(self, driver_works: bool = True) -> int:
        """Threads unless somebody asks for a number: one on each physical core.

        Args:
            driver_works: whether the thread that waits for the experts is one of them; if not (it
                feeds a GPU), a core is left to it.
        """
        threads = min(self.usable, len(self.physical))
        return threads if driver_works else max(1, threads - 1)

    @property
    def order(self) -> tuple[int, ...]:
        """The cores in the order in which workers take them: other physical cores before siblings.

        From the last one down, which leaves the first to the driver and to interrupts.
        """
        most = max(len(siblings) for siblings in self.physical)
        return tuple(
            siblings[i]
            for i in range(most)
            for siblings in reversed(self.physical)
            if i < len(siblings)
        )

    def at(self, node: NumaNode) -> Topology:
        """This machine with the cores of one node alone."""
        return replace(
            self,
            cores=node.cores,
            physical=tuple(group for group in self.physical if group[0] in node.cores),
            nodes=(node,),
        )

    @classmethod
    def detect(cls, root: Path = Path("/"), affinity: Iterable[int] | None = None) -> Topology:
        """This machine, now; with ``PYKERNELS_FAKE_NUMA`` its cores dealt over made-up nodes.

        Args:
            root: where ``proc`` and ``sys`` lie, and
            affinity: logical CPUs that the process may run on; both for tests.
        """
        cores = tuple(sorted(os.sched_getaffinity(0) if affinity is None else affinity))
        machine = psutil.virtual_memory()
        limits = memory_limits(root)
        topology = cls(
            cores,
            _physical(root, cores),
            cpu_quota(root),
            _nodes(root, cores),
            min([machine.total, *(m.limit for m in limits)]),
            min([machine.available, *(m.free for m in limits)]),
            _huge_pages(root),
        )
        return topology._dealt(env.fake_numa) if env.fake_numa else topology

    @classmethod
    def fake(cls, nodes: int, cores: int | None = None) -> Topology:
        """This machine with its cores dealt over made-up nodes, for tests and experiments.

        Args:
            nodes: how many.
            cores: of each; None for as many as there are.

        Raises:
            PykernelsError: none, or more than this machine's usable cores.
        """
        with env.override(fake_numa=None):
            return cls.detect()._dealt(nodes, cores)

    def _dealt(self, nodes: int, cores: int | None = None) -> Topology:
        if nodes < 1 or (cores is not None and cores < 1):
            of = "" if cores is None else f" of {cores} cores"
            raise PykernelsError(f"{nodes} made-up NUMA nodes{of}", "Ask for 1 or more of both")
        most = len(self.physical)
        each = cores or max(1, most // nodes)
        if each * nodes > most:
            raise PykernelsError(
                f"{nodes} made-up NUMA node{'s' * (nodes > 1)} of {each} core{'s' * (each > 1)} are"
                f" more than the {most} core{'s' * (most > 1)} that this process may use",
                "Ask for fewer (PYKERNELS_FAKE_NUMA)",
            )
        groups = self.physical[: each * nodes]
        mine = [groups[i * each : (i + 1) * each] for i in range(nodes)]
        return replace(
            self,
            cores=tuple(sorted(core for group in groups for core in group)),
            physical=groups,
            nodes=tuple(
                NumaNode(
                    None,
                    tuple(sorted(core for group in part for core in group)),
                    self.memory_total // nodes,
                    self.memory_available // nodes,
                )
                for part in mine
            ),
        )


def _physical(root: Path, cores: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    groups: dict[tuple[int, ...], None] = {}
    for core in cores:
        path = root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        siblings = _parse_cpu_list(read(path) or "")
        if core not in siblings:  # /sys says nothing, or a container's /sys is wrong
            siblings = [core]
        groups[tuple(cpu for cpu in siblings if cpu in cores)] = None
    return tuple(groups)


def _nodes(root: Path, cores: tuple[int, ...]) -> tuple[NumaNode, ...]:
    allowed = re.search(
        r"^Mems_allowed_list:\s*(\S+)$", read(root / "proc/self/status") or "", re.MULTILINE
    )
    nodes = []
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    for path in sorted(folders, key=lambda p: int(p.name[4:])):
        number = int(path.name[4:])
        listed = _parse_cpu_list(read(path / "cpulist") or "")
        mine = tuple(cpu for cpu in listed if cpu in cores)
        if not mine:
            continue
        meminfo = read(path / "meminfo") or ""
        if allowed and number not in _parse_cpu_list(allowed[1]):
            meminfo = ""
        # What a new allocation can have: about what the kernel calls available, of one node.
        given_up = (r"Active\(file\)", r"Inactive\(file\)", "SReclaimable")
        free = sum(_kib(meminfo, name) for name in ("MemFree", *given_up))
        nodes.append(NumaNode(number, mine, _kib(meminfo, "MemTotal"), free))
    machine = psutil.virtual_memory()
    return tuple(nodes) or (NumaNode(None, cores, machine.total, machine.available),)


def _kib(meminfo: str, name: str) -> int:
    """Bytes of one line of a node's ``meminfo``; 0 if there is none."""
    match = re.search(rf" {name}:\s*(\d+) kB", meminfo)
    return int(match[1]) << 10 if match else 0


def _parse_cpu_list(text: str) -> list[int]:
    """ "0-3,8" -> [0, 1, 2, 3, 8]."""
    cpus: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cpus += range(int(first), int(last or first) + 1)
    return cpus


def _huge_pages(root: Path) -> str:
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    chosen = re.search(r"\[(\w+)\]", read(path) or "")
    return chosen[1] if chosen else "unknown"
