"""The doctor's facts about cores and NUMA nodes, and how the expert workers use them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pykernels.env import env

from .report import Fact

if TYPE_CHECKING:
    from runtime.machine.topology import Topology

GIB = 1 << 30


def topology_facts(topology: Topology) -> Iterator[Fact]:
    """Usable cores, the quota, default worker threads, NUMA nodes and whether experts are split."""
    cores, physical = len(topology.cores), len(topology.physical)
    siblings = f", on {physical} physical cores" if physical < cores else ""
    yield Fact("cores", f"{cores} of {os.cpu_count()} may be used{siblings}")
    if math.isfinite(topology.cpu_quota):
        yield Fact("CPU quota", f"the cgroup grants {topology.cpu_quota:g} CPUs' worth of time")
    threads, with_gpu = (topology.default_threads(works) for works in (True, False))
    asked = f" (PYKERNELS_THREADS: {env.threads})" if env.threads else ""
    yield Fact("workers", f"{threads} by default, {with_gpu} with a GPU{asked}")
    yield from _nodes(topology)


def _nodes(topology: Topology) -> Iterator[Fact]:
    from runtime.workers.numa import why_not_split

    for i, node in enumerate(topology.nodes if len(topology.nodes) > 1 else ()):
        made_up = node.number is None
        yield Fact(
            f"made-up node {i}" if made_up else f"node {node.number}",
            f"{len(node.cores)} core(s), {node.memory_free / GIB:.1f} GiB free of"
            f" {node.memory_total / GIB:.1f} GiB",
        )
    why = why_not_split(topology, env.threads)
    use = f"not split: {why}" if why else "split across the nodes (--numa off: one pool over all)"
    yield Fact("NUMA", f"{len(topology.nodes)} node(s); experts are {use}")
