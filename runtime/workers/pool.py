"""Making pools, and the pool that all experts share."""

from __future__ import annotations

import threading
import warnings

from pykernels.env import env

from ..machine.topology import Topology
from .job import TaskError
from .numa import AUTO, OFF, nodes_to_use, why_not_split
from .worker_pool import InFlight, WorkerPool

_default: WorkerPool | None = None
_making = threading.RLock()


def make_pool(
    threads: int | None = None,
    driver_works: bool = True,
    numa: str | int = AUTO,
    topology: Topology | None = None,
) -> WorkerPool:
    """Threads on the whole machine, or dealt over its NUMA nodes.

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
    nodes = [] if env.debug else nodes_to_use(topology, numa, threads, driver_works)
    if numa == AUTO and len(topology.nodes) > 1 and not nodes and not env.debug:
        why = why_not_split(topology, threads, driver_works)
        warnings.warn(f"the weights are not split across the NUMA nodes: {why}", stacklevel=2)
    return WorkerPool(threads, driver_works, topology, nodes, narrow=numa == AUTO)


def default_pool() -> WorkerPool:
    """The pool that experts share unless given another; made at first use."""
    global _default
    with _making:
        if _default is None:
            _default = make_pool()
        return _default


def configure_default_pool(
    threads: int | None = None, driver_works: bool = True, numa: str | int = OFF
) -> WorkerPool:
    """Replaces the shared pool; experts without a pool of their own use it from their next call.

    See ``make_pool``. Weights stay sliced as they were loaded: give them as many nodes again.
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
    "TaskError",
    "WorkerPool",
    "configure_default_pool",
    "default_pool",
    "make_pool",
]
