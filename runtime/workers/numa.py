"""A pool on each NUMA node, for experts that are split across them (SOSP'25 section 3.3).

Every worker reads only what its own node's memory holds; the nodes' partial sums are added once, at
the end of a call.
"""

from __future__ import annotations

from collections.abc import Sequence

from pykernels.env import env
from pykernels.errors import PykernelsError

from ..machine.memory import binding_problem
from ..machine.topology import Node, Topology
from .worker_pool import WorkerPool, spin_budget, whole_threads

AUTO, OFF = "auto", "off"


def check_numa(numa: str | int) -> str:
    """``numa`` as a string, if it is "auto", "off" or a whole number from 1.

    Raises:
        PykernelsError: it is none of them.
    """
    numa = str(numa)
    if numa not in (AUTO, OFF) and not (numa.isdecimal() and int(numa) >= 1):
        raise PykernelsError(
            f"NUMA setting {numa!r} is not known", "Use auto, off or the number of nodes"
        )
    return numa


def nodes_to_use(
    topology: Topology,
    numa: str | int = AUTO,
    threads: int | None = None,
    driver_works: bool = True,
) -> list[Node]:
    """The nodes across which experts are split; fewer than two: not at all.

    Args:
        numa: "auto" for every node with usable cores and memory, "off" for none, or how many such
            nodes the machine must have.
        threads: asked for; None for the default number.
        driver_works: see ``Topology.default_threads``.

    Raises:
        PykernelsError: a number of nodes that is not the machine's, or more than threads, or memory
            that cannot be bound to them.
    """
    numa, threads = check_numa(numa), whole_threads(threads)
    nodes, problem = _candidates(topology, threads or topology.default_threads(driver_works))
    if numa == OFF:
        return []
    if numa == AUTO:
        return [] if problem else nodes
    if int(numa) != len(nodes):
        raise PykernelsError(
            f"--numa {numa} was asked for, {len(nodes)} NUMA node(s) have cores and memory that"
            " this process may use",
            f"Use --numa auto, off or {len(nodes)}",
        )
    if problem and len(nodes) > 1:
        raise PykernelsError(f"--numa {numa} cannot be had: {problem}", "Use --numa off, or fix it")
    return nodes


def why_not_split(
    topology: Topology, threads: int | None = None, driver_works: bool = True
) -> str | None:
    """Why "auto" does not split experts across nodes, as a clause; None if it does."""
    return _candidates(topology, threads or topology.default_threads(driver_works))[1]


def _candidates(topology: Topology, threads: int) -> tuple[list[Node], str | None]:
    """Nodes with cores and memory, and why they cannot all be used, as a clause."""
    nodes = [node for node in topology.nodes if node.memory_total > 0]
    if len(nodes) < 2:
        return nodes, "there is one node"
    if threads < len(nodes):
        return nodes, f"{threads} thread(s) are fewer than {len(nodes)} nodes"
    refused = (binding_problem(node.number) for node in nodes if node.number is not None)
    return nodes, next((why for why in refused if why), None)


class NodePools:
    """One ``WorkerPool`` on each of several nodes.

    With ``driver_works`` the thread that waits works for the first node, on the core that this
    node's workers leave free.

    Args:
        nodes: at least two of the topology's.
        threads: in all; None for PYKERNELS_THREADS, or else ``Topology.default_threads``.
        narrow: whether a layer too narrow for all nodes may stay on the first ones.

    Raises:
        PykernelsError: more threads than usable cores, or fewer than nodes.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        threads: int | None = None,
        driver_works: bool = True,
        topology: Topology | None = None,
        narrow: bool = True,
    ) -> None:
        topology = topology or Topology.detect()
        wanted = whole_threads(env.threads if threads is None else threads)
        rooms = [len(node.cores) for node in nodes]
        if wanted is None:
            rooms = [topology.at(node).default_threads() for node in nodes]
            wanted = min(topology.default_threads(driver_works), sum(rooms))
        self.threads, self.driver_works, self.narrow = wanted, driver_works, narrow
        if not len(nodes) <= wanted <= min(sum(rooms), topology.usable):
            most = min(sum(rooms), topology.usable)
            raise PykernelsError(
                f"{wanted} threads asked for on {len(nodes)} NUMA nodes, {most} cores are usable",
                f"Use {len(nodes)} to {most} threads, or --numa off",
            )
        self.pools: list[WorkerPool] = []
        spin_us = spin_budget(driver_works)
        try:
            for i, (node, count) in enumerate(zip(nodes, deal(wanted, rooms), strict=True)):
                works = driver_works and i == 0
                place = topology.at(node)
                self.pools.append(WorkerPool(count, works, place, node.number, spin_us))
        except BaseException:
            self.close()
            raise

    def settle(self) -> None:
        """``WorkerPool.settle`` of all nodes."""
        for pool in self.pools:
            pool.settle()

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


def deal(threads: int, rooms: Sequence[int]) -> list[int]:
    """Threads of each node: as even as their cores (``rooms``) allow, the last nodes first.

    The first node has the fewest, since the driver runs on it.
    """
    dealt = [0] * len(rooms)
    for _ in range(threads):
        free = [i for i in range(len(rooms)) if dealt[i] < rooms[i]]
        dealt[min(free, key=lambda i: (dealt[i], -i))] += 1
    return dealt


def wait_all(pools: Sequence[WorkerPool], calls: Sequence[int] | None = None) -> float:
    """Waits for a call of every pool; returns the seconds of the longest.

    Args:
        calls: their numbers; None for the ones that run.

    Raises:
        TaskError: a task failed; the calls of all pools have ended.
    """
    call = calls[0] if calls else None
    if len(pools) == 1:
        return pools[0].wait(call)
    try:
        seconds = pools[0].wait(call)
    finally:
        others = wait_all(pools[1:], calls[1:] if calls else None)
    return max(seconds, others)
