"""Which NUMA nodes the weights are split across (SOSP'25 section 3.3)."""

from __future__ import annotations

from pykernels.errors import PykernelsError

from ..machine.topology import NumaNode, Topology
from .threads import whole_threads

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
) -> list[NumaNode]:
    """The nodes across which weights are split; fewer than two: not at all.

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
    """Why "auto" does not split weights across nodes, as a clause; None if it does."""
    return _candidates(topology, threads or topology.default_threads(driver_works))[1]


def _candidates(topology: Topology, threads: int) -> tuple[list[NumaNode], str | None]:
    """Nodes with cores and memory, and why they cannot all be used, as a clause."""
    from ..machine.memory import binding_problem  # imports torch, which --help does without

    nodes = [node for node in topology.nodes if node.memory_total > 0]
    if len(nodes) < 2:
        return nodes, "there is one node"
    if threads < len(nodes):
        return nodes, f"{threads} thread(s) are fewer than {len(nodes)} nodes"
    refused = (binding_problem(node.number) for node in nodes if node.number is not None)
    return nodes, next((why for why in refused if why), None)
