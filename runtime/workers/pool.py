"""Pools: workers on one node or on each of several, and the pool that all experts share."""

from __future__ import annotations

import warnings
from typing import Literal, overload

from pykernels.env import env

from ..machine.topology import Topology
from .control import TaskError
from .locks import ForkSafeLock
from .numa import AUTO, OFF, NodePools, Pool, nodes_to_use, wait_all, why_not_split
from .worker_pool import Call, WorkerPool

_default: Pool | None = None
_making = ForkSafeLock()


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
    with _making.lock:
        if _default is None:
            made = make_pool()
            if _default is None:  # else a signal handler made one meanwhile, which is in use
                _default = made
            else:
                made.close()
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
    with _making.lock:
        fresh = make_pool(threads, driver_works, numa)
        # In this order: if Ctrl-C cuts ``close`` short, the shared pool is an open one.
        before, _default = _default, fresh
        if before is not None:
            before.close()
        return fresh


__all__ = [
    "Call",
    "NodePools",
    "Pool",
    "TaskError",
    "WorkerPool",
    "configure_default_pool",
    "default_pool",
    "make_pool",
    "wait_all",
]
