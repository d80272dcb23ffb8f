"""Pools: workers on one node or on each of several, and the pool that all experts share."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import Literal, overload

from pykernels.env import env

from ..machine.topology import NumaNode, Topology
from .job import Jobs, TaskError
from .numa import AUTO, OFF, nodes_to_use, why_not_split
from .threads import spin_budget, threads_of_nodes
from .worker_pool import InFlight, WorkerPool

_default: Pool | None = None
_making = threading.RLock()


class NodePools:
    """One ``WorkerPool`` on each of several NUMA nodes (SOSP'25 section 3.3).

    Every worker reads only what its own node's memory holds. With ``driver_works`` the thread that
    waits works for the first node, on the core that this node's workers leave free.

    Args:
        nodes: at least two of the topology's.
        threads: in all; None for PYKERNELS_THREADS, or else ``Topology.default_threads``.
        narrow: whether a layer too narrow for all nodes may stay on the first ones.

    Raises:
        PykernelsError: more threads than usable cores, or fewer than nodes.
    """

    def __init__(
        self,
        nodes: Sequence[NumaNode],
        threads: int | None = None,
        driver_works: bool = True,
        topology: Topology | None = None,
        narrow: bool = True,
    ) -> None:
        topology = topology or Topology.detect()
        dealt = threads_of_nodes(nodes, threads, driver_works, topology)
        self.threads, self.driver_works, self.narrow = sum(dealt), driver_works, narrow
        self.pools: list[WorkerPool] = []
        spin_us = spin_budget(driver_works)
        try:
            for i, (node, count) in enumerate(zip(nodes, dealt, strict=True)):
                place, works = topology.at(node), driver_works and i == 0
                self.pools.append(WorkerPool(count, works, place, node.number, spin_us))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the workers of all nodes. Safe to call twice."""
        for pool in self.pools:
            pool.close()

    def __enter__(self) -> NodePools:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Pool = WorkerPool | NodePools
"""Threads on one node, or on each of several: ``.pools`` has them, ``.threads`` is their number."""


def run_on_all(pool: Pool, jobs: Sequence[Jobs], kept: object = None) -> float:
    """Runs jobs on each node's pool at once; returns the seconds of the longest.

    Raises:
        TaskError: a task failed; the jobs of all pools have ended.
    """
    flights = [each.start(one, kept) for each, one in zip(pool.pools, jobs, strict=True)]
    for each, in_flight in zip(pool.pools, flights, strict=True):
        each.wait(in_flight)
    for in_flight in flights:
        if in_flight.error is not None:
            raise in_flight.error
    return max(in_flight.seconds for in_flight in flights)


def make_pool(
    threads: int | None = None,
    driver_works: bool = True,
    numa: str | int = AUTO,
    topology: Topology | None = None,
) -> Pool:
    """Threads as one pool, or one on each NUMA node.

    Args:
        threads: in all; None for PYKERNELS_THREADS, or else one on each usable physical core.
        driver_works: see ``WorkerPool``.
        numa: see ``nodes_to_use``.
        topology: None for this machine's.

    Raises:
        PykernelsError: threads or nodes that this machine has not.
    """
    topology = topology or Topology.detect()
    threads = env.threads if threads is None else threads
    nodes = nodes_to_use(topology, numa, threads, driver_works)
    if numa == AUTO and len(topology.nodes) > 1 and not nodes:
        why = why_not_split(topology, threads, driver_works)
        warnings.warn(f"experts are not split across the NUMA nodes: {why}", stacklevel=2)
    if len(nodes) < 2:
        return WorkerPool(threads, driver_works, topology)
    return NodePools(nodes, threads, driver_works, topology, narrow=numa == AUTO)


def default_pool() -> Pool:
    """The pool that experts share unless given another; made at first use."""
    global _default
    with _making:
        if _default is None:
            _default = make_pool()
        return _default


@overload
def configure_default_pool(
    threads: int | None = None, driver_works: bool = True, numa: Literal["off"] = "off"
) -> WorkerPool: ...
@overload
def configure_default_pool(
    threads: int | None = None, driver_works: bool = True, *, numa: str | int
) -> Pool: ...
def configure_default_pool(
    threads: int | None = None, driver_works: bool = True, numa: str | int = OFF
) -> Pool:
    """Replaces the shared pool; experts without a pool of their own use it from their next call.

    See ``make_pool``. Experts that were split across nodes stay so: give them as many again.
    """
    global _default
    with _making:
        fresh = make_pool(threads, driver_works, numa)
        # In this order: if Ctrl-C cuts ``close`` short, the shared pool is an open one.
        before, _default = _default, fresh
        if before is not None:
            before.close()
        return fresh


__all__ = [
    "InFlight",
    "NodePools",
    "Pool",
    "TaskError",
    "WorkerPool",
    "configure_default_pool",
    "default_pool",
    "make_pool",
    "run_on_all",
]
