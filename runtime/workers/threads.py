"""How many threads, dealt over which nodes, and how long an idle one spins."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import SupportsIndex

from pykernels.env import env
from pykernels.errors import PykernelsError

from ..machine.topology import NumaNode, Topology

_SPIN_US, _SPIN_US_WITH_GPU = 50.0, 1000.0


def spin_budget(driver_works: bool) -> float:
    """Microseconds that an idle thread spins: PYKERNELS_SPIN_US, or else what suits the driver.

    Waking a sleeper takes up to 50 us. Where torch computes on the same cores between the calls, a
    longer spin would hold it up; with a GPU the workers' cores have nothing else to do.
    """
    if (asked := env.spin_us) is not None:
        return asked
    return _SPIN_US if driver_works else _SPIN_US_WITH_GPU


def whole_threads(threads: object) -> int | None:
    """A number of threads as asked for; None stays None.

    Raises:
        PykernelsError: it is no whole number.
    """
    if threads is None:
        return None
    if isinstance(threads, bool) or not isinstance(threads, SupportsIndex):
        raise PykernelsError(
            f"{threads!r} threads asked for, which is no whole number", "Give an int, or None"
        )
    return index(threads)


def threads_here(threads: int | None, driver_works: bool, topology: Topology) -> int:
    """Threads of one pool; in the debug mode (PYKERNELS_DEBUG) one, whatever is asked for.

    Args:
        threads: asked for; None for PYKERNELS_THREADS, or else ``Topology.default_threads``.

    Raises:
        PykernelsError: more than usable cores, fewer than one, or no whole number.
    """
    wanted = whole_threads(env.threads if threads is None else threads)
    count = topology.default_threads(driver_works) if wanted is None else wanted
    if not 1 <= count <= topology.usable:
        raise PykernelsError(
            f"{count} threads asked for, {topology.usable} cores are usable",
            f"Use 1 to {topology.usable} threads",
        )
    return 1 if env.debug else count


def threads_of_nodes(
    nodes: Sequence[NumaNode], threads: int | None, driver_works: bool, topology: Topology
) -> list[int]:
    """Threads of the pool on each node; arguments as in ``threads_here``.

    Raises:
        PykernelsError: more than usable cores, or fewer than nodes.
    """
    wanted = whole_threads(env.threads if threads is None else threads)
    cores = [len(node.cores) for node in nodes]
    if wanted is None:
        cores = [topology.at(node).default_threads() for node in nodes]
        wanted = min(topology.default_threads(driver_works), sum(cores))
    most = min(sum(cores), topology.usable)
    if not len(nodes) <= wanted <= most:
        raise PykernelsError(
            f"{wanted} threads asked for on {len(nodes)} NUMA nodes, {most} cores are usable",
            f"Use {len(nodes)} to {most} threads, or --numa off",
        )
    return deal(wanted, cores)


def deal(threads: int, cores: Sequence[int]) -> list[int]:
    """Threads of each node: as even as their cores (``cores``) allow, the last nodes first.

    The first node has the fewest, since the driver runs on it.
    """
    dealt = [0] * len(cores)
    for _ in range(threads):
        free = [i for i in range(len(cores)) if dealt[i] < cores[i]]
        dealt[min(free, key=lambda i: (dealt[i], -i))] += 1
    return dealt
