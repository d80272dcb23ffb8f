"""Cores, nodes and limits, from a fake /proc and /sys for each kind of machine."""

from __future__ import annotations

import math
from pathlib import Path

import psutil
import pytest

from pykernels.errors import PykernelsError
from runtime.machine.topology import NumaNode, Topology
from runtime.workers.numa import nodes_to_use, why_not_split
from runtime.workers.pool import WorkerPool

GIB = 1 << 30
V2 = "36 25 0:30 {root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
NO_SOURCE = "35 25 0:39 / /tmp rw,relatime - tmpfs  rw\n"
V1 = (
    "33 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:31 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)
CPUSET = "32 31 0:28 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
BOTH = V1.format(root="/") + V2.format(root="/").replace("fs/cgroup", "fs/cgroup/unified")
V1_PATHS = "4:memory:{path}\n2:cpu,cpuacct:{path}\n1:name=systemd:/\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    """``root`` with the files, and a CPU of two cores with two SMT siblings each."""
    cpus = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 2},{cpu % 2 + 2}"
        for cpu in range(4)
    }
    for name, text in {**cpus, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def detect(root: Path, affinity=range(4)) -> Topology:
    return Topology.detect(root, affinity)


CG = "sys/fs/cgroup"
QUOTAS = [
    pytest.param({}, math.inf, 4, id="no cgroups at all"),
    pytest.param(
        {
            "proc/self/mountinfo": NO_SOURCE + V2.format(root="/"),
            "proc/self/cgroup": "0::/",
            f"{CG}/cpu.max": "150000 100000",
        },
        1.5,
        1,
        id="v2, a container's own root: half a CPU is no thread",
    ),
    pytest.param(
        {
            "proc/self/mountinfo": V2.format(root="/"),
            "proc/self/cgroup": "0::/a.slice/b.scope",
            f"{CG}/a.slice/cpu.max": "200000 100000",
            f"{CG}/a.slice/b.scope/cpu.max": "max 100000",
        },
        2.0,
        2,
        id="v2, nested: the parent's limit",
    ),
    pytest.param(
        {
            "proc/self/mountinfo": V1.format(root="/"),
            "proc/self/cgroup": V1_PATHS.format(path="/x"),
            f"{CG}/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            f"{CG}/cpu,cpuacct/x/cpu.cfs_quota_us": "50000",
            f"{CG}/cpu,cpuacct/x/cpu.cfs_period_us": "100000",
        },
        0.5,
        1,
        id="v1, nested: less than one CPU is still one thread",
    ),
    pytest.param(
        {
            "proc/self/mountinfo": V1.format(root="/docker/7"),
            "proc/self/cgroup": V1_PATHS.format(path="/docker/7"),
            f"{CG}/cpu,cpuacct/cpu.cfs_quota_us": "250000",
        },
        2.5,
        2,
        id="v1, docker: the path is the host's, the mount the container's",
    ),
    pytest.param(
        {
            "proc/self/mountinfo": CPUSET + BOTH,
            "proc/self/cgroup": "5:cpuset:/narrow\n" + V1_PATHS.format(path="/") + "0::/u",
            f"{CG}/unified/u/cpu.max": "max 100000",
            f"{CG}/cpuset/cpu.cfs_quota_us": "100000",
            f"{CG}/cpu,cpuacct/cpu.cfs_quota_us": "300000",
        },
        3.0,
        3,
        id="both: v1 has the controller, and a cpuset is another one",
    ),
]


@pytest.mark.parametrize(("files", "quota", "usable"), QUOTAS)
def test_quota(tmp_path: Path, files: dict[str, str], quota: float, usable: int) -> None:
    found = detect(tree(tmp_path, files))
    assert (found.cpu_quota, found.usable) == (quota, usable)
    assert found.default_threads() == min(2, usable)


MEMORY = [
    pytest.param(
        {
            "proc/self/mountinfo": V2.format(root="/"),
            "proc/self/cgroup": "0::/a/b",
            f"{CG}/a/memory.max": str(3 << 20),
            f"{CG}/a/memory.current": str(2 << 20),
            f"{CG}/a/memory.stat": f"anon 5\ninactive_file {1 << 19}",
            f"{CG}/a/b/memory.max": "max",
            f"{CG}/a/b/memory.current": "1",
        },
        3 << 20,
        3 << 19,
        id="v2, the parent's limit; its page cache is free",
    ),
    pytest.param(
        {
            "proc/self/mountinfo": V1.format(root="/"),
            "proc/self/cgroup": V1_PATHS.format(path="/p"),
            f"{CG}/memory/memory.limit_in_bytes": "9223372036854771712",
            f"{CG}/memory/memory.usage_in_bytes": "12345",
            f"{CG}/memory/p/memory.limit_in_bytes": str(8 << 20),
            f"{CG}/memory/p/memory.usage_in_bytes": str(7 << 20),
            f"{CG}/memory/p/memory.stat": "inactive_file 0\ntotal_inactive_file 4096",
        },
        8 << 20,
        (1 << 20) + 4096,
        id="v1, nested; the root's huge number is no limit",
    ),
]


@pytest.mark.parametrize(("files", "total", "available"), MEMORY)
def test_memory(tmp_path: Path, files: dict[str, str], total: int, available: int) -> None:
    found = detect(tree(tmp_path, files))
    assert (found.memory_total, found.memory_available) == (total, available)


def test_a_bare_machine(tmp_path: Path) -> None:
    """No NUMA, no cgroups, no huge pages; a container's /sys may be wrong about siblings."""
    path = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    found = detect(tree(tmp_path, {path.format(1): "0", path.format(3): "64-65"}))
    assert found.physical == ((0, 2), (1,), (3,))
    (node,) = found.nodes
    total = psutil.virtual_memory().total
    assert (node.number, node.cores) == (None, (0, 1, 2, 3))
    assert node.memory_total == found.memory_total == total
    assert found.huge_pages == "unknown"
    mode = {"sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never"}
    assert detect(tree(tmp_path, mode)).huge_pages == "madvise"


SIBLINGS = [
    # CPUs 0 and 2 are one physical core, 1 and 3 the other.
    pytest.param((0, 1, 2, 3), ((0, 2), (1, 3)), (1, 0, 3, 2), 2, 1, id="two cores of two threads"),
    pytest.param((0, 3), ((0,), (3,)), (3, 0), 2, 1, id="one thread of each core"),
    pytest.param((1, 2, 3), ((1, 3), (2,)), (2, 1, 3), 2, 1, id="ragged"),
]


@pytest.mark.parametrize(("affinity", "physical", "order", "threads", "with_gpu"), SIBLINGS)
def test_workers_take_physical_cores_first(
    tmp_path: Path, affinity, physical, order, threads: int, with_gpu: int
) -> None:
    found = detect(tree(tmp_path, {}), affinity)
    assert (found.physical, found.order) == (physical, order)
    assert (found.default_threads(), found.default_threads(False)) == (threads, with_gpu)
    assert found.usable == len(affinity)  # --threads may ask for all


def meminfo(node: int, total: int, free: int, cache: int = 0) -> str:
    """``cache``: of each of the three kinds of memory that is given up."""
    return (
        f"Node {node} MemTotal:       {total >> 10} kB\n"
        f"Node {node} MemFree:        {free >> 10} kB\n"
        f"Node {node} Active(file):   {cache >> 10} kB\n"
        f"Node {node} Inactive(file): {cache >> 10} kB\n"
        f"Node {node} Active(anon):   {9 * GIB >> 10} kB\n"
        f"Node {node} SReclaimable:   {cache >> 10} kB"
    )


NODE = "sys/devices/system/node/node"
TWO = {
    f"{NODE}0/cpulist": "0,2",
    f"{NODE}0/meminfo": meminfo(0, 64 * GIB, 10 * GIB, 2 * GIB),
    f"{NODE}1/cpulist": "1,3",
    f"{NODE}1/meminfo": meminfo(1, 64 * GIB, 20 * GIB),
}
NODES = [
    pytest.param(TWO, range(4), [64, 64], 2, id="two nodes"),
    pytest.param(TWO, (1, 3), [64], 1, id="pinned to one"),
    pytest.param(
        {
            f"{NODE}2/cpulist": "0-1",
            f"{NODE}10/cpulist": "2,8",
            f"{NODE}2/meminfo": meminfo(2, 7 * GIB, 0),
            f"{NODE}10/meminfo": meminfo(10, 9 * GIB, 0),
        },
        range(9),
        [7, 9],
        2,
        id="ordered by number",
    ),
    pytest.param(
        {**TWO, "proc/self/status": "Mems_allowed_list:\t0,10-11"},
        range(4),
        [64, 0],
        1,
        id="the cpuset forbids its memory",
    ),
    pytest.param(
        {**TWO, f"{NODE}2/cpulist": "", f"{NODE}2/meminfo": meminfo(2, 9 * GIB, 9 * GIB)},
        range(4),
        [64, 64],
        2,
        id="memory without cores (CXL): no node to work on",
    ),
]


@pytest.mark.parametrize(("files", "affinity", "gib", "usable"), NODES)
def test_nodes(tmp_path: Path, monkeypatch, files, affinity, gib: list[int], usable: int) -> None:
    monkeypatch.setattr("runtime.machine.memory.binding_problem", lambda node: None)
    found = detect(tree(tmp_path, files), affinity)
    assert [node.memory_total // GIB for node in found.nodes] == gib
    split = nodes_to_use(found, "auto")
    assert len(split) == (usable if usable > 1 else 0)
    assert nodes_to_use(found, "off") == []
    assert len(nodes_to_use(found, str(usable))) == usable
    with pytest.raises(PykernelsError, match=rf"--numa {usable + 1} .*, {usable} NUMA node"):
        nodes_to_use(found, str(usable + 1))


def test_a_node_has_its_cores_and_its_idle_page_cache(tmp_path: Path) -> None:
    found = detect(tree(tmp_path, TWO))
    first, second = found.nodes
    assert (first.memory_free, second.memory_free) == (16 * GIB, 20 * GIB)
    assert (first.number, first.cores, second.cores) == (0, (0, 2), (1, 3))
    alone = found.at(second)
    assert (alone.cores, alone.physical, alone.default_threads()) == ((1, 3), ((1, 3),), 1)


REFUSALS = [
    ("auto", None, "the system refuses mbind", ""),
    ("2", None, "the system refuses mbind", "the system refuses mbind"),
    ("2", 1, None, r"1 thread\(s\) are fewer than 2 nodes"),
    ("both", None, None, "'both' is not known"),
]


@pytest.mark.parametrize(("numa", "threads", "problem", "cause"), REFUSALS)
def test_a_split_that_cannot_be(tmp_path, monkeypatch, numa, threads, problem, cause) -> None:
    """With "auto" there is one pool and a reason; what was asked for is an error."""
    monkeypatch.setattr("runtime.machine.memory.binding_problem", lambda node: problem)
    found = detect(tree(tmp_path, TWO))
    if cause:
        with pytest.raises(PykernelsError, match=cause):
            nodes_to_use(found, numa, threads)
    else:
        assert nodes_to_use(found, numa, threads) == []
        assert why_not_split(found, threads)


def test_threads_that_do_not_fit_the_nodes_are_refused() -> None:
    cores = tuple(range(6))
    nodes = tuple(NumaNode(n, cores[3 * n : 3 * n + 3], GIB, GIB) for n in range(2))
    topology = Topology(cores, tuple((c,) for c in cores), 4.5, nodes, GIB, GIB, "always")
    with pytest.raises(PykernelsError, match="5 threads .* 2 NUMA nodes, 4 cores are usable"):
        WorkerPool(5, topology=topology, nodes=nodes)  # the quota is 4.5 CPUs
