"""Memory for weights: huge pages, NUMA nodes, and what the system refuses."""

from __future__ import annotations

import errno
import mmap
import os
import platform
import re
from pathlib import Path

import pytest

from pykernels.env import env
from pykernels.errors import PykernelsError
from runtime.machine import memory
from runtime.machine.memory import HUGE_PAGE, allocate
from runtime.machine.topology import Topology


def test_memory_is_aligned_and_zero():
    found = allocate(3 * HUGE_PAGE + 5)
    assert found.data_ptr() % HUGE_PAGE == 0 and found.numel() == 3 * HUGE_PAGE + 5
    assert found[::4096].eq(0).all() and found[-1] == 0
    assert allocate(0).numel() == 0  # the scales of a format without any
    with pytest.raises(PykernelsError, match="GiB"):
        allocate(1 << 62)


@pytest.mark.skipif(Topology.detect().huge_pages == "unknown", reason="no huge pages here")
@pytest.mark.parametrize(
    ("asked", "nbytes"), [(True, HUGE_PAGE), (False, HUGE_PAGE), (True, HUGE_PAGE - 1)]
)
def test_huge_pages_are_asked_for_unless_off_or_too_large(asked, nbytes):
    with env.override(hugepages=asked):
        found = allocate(nbytes)
    expected = asked and nbytes >= HUGE_PAGE
    mappings = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    for mapping in filter(None, mappings):
        first, last = (int(at, 16) for at in mapping.split(" ", 1)[0].split("-"))
        if first <= found.data_ptr() < last:
            if (flags := re.search(r"(?m)^VmFlags:(.*)$", mapping)) is None:
                pytest.skip("the system does not show flags of memory")
            assert ("hg" in flags[1].split()) == expected  # man 5 proc: huge page advise flag
            return
    raise AssertionError("the memory is in no mapping")


@pytest.mark.skipif(Topology.detect().huge_pages == "unknown", reason="no huge pages here")
def test_huge_pages_are_counted():
    """Where the system gives them: no more than were touched, and none where none are wanted."""
    with env.override(hugepages=True):
        found = allocate(8 * HUGE_PAGE)
        found[: 4 * HUGE_PAGE].fill_(1)
        memory.collapse(found[: 4 * HUGE_PAGE])
    with env.override(hugepages=False):
        plain = allocate(8 * HUGE_PAGE)
        plain.fill_(1)
    if Topology.detect().huge_pages == "madvise":
        assert memory.huge_bytes(plain) == 0
    if (got := memory.huge_bytes(found)) == 0:
        pytest.skip("the system gave none")
    assert got % HUGE_PAGE == 0 and got <= 4 * HUGE_PAGE


def test_a_kernel_without_huge_pages_gives_plain_ones(monkeypatch):
    class Plain(mmap.mmap):
        def madvise(self, *_):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr("runtime.machine.memory.mmap.mmap", Plain)
    assert allocate(HUGE_PAGE).eq(0).all()


def test_memory_is_bound_to_its_node_before_it_is_touched() -> None:
    if problem := memory.binding_problem(0):
        pytest.skip(problem)
    bound, free = allocate(3 * HUGE_PAGE, node=0), allocate(3 * HUGE_PAGE)
    assert memory.policy_node(bound) == 0 and memory.policy_node(free) is None
    assert memory.page_nodes(bound) == {-2}  # ENOENT: no page was touched yet
    bound.fill_(1)
    assert memory.page_nodes(bound) == {0}


def test_a_missing_node_and_a_missing_system_call_are_named(monkeypatch) -> None:
    with pytest.raises(PykernelsError, match="refuses mbind: Invalid argument.*numactl --hardware"):
        allocate(HUGE_PAGE, node=1000)
    assert "mbind" in (memory.binding_problem(1000) or "")
    monkeypatch.setitem(memory._SYSCALLS, platform.machine(), (9999, 9999, 9999))
    with pytest.raises(PykernelsError, match="Function not implemented.*--cap-add SYS_NICE"):
        allocate(HUGE_PAGE, node=0)


def test_a_system_that_ignores_binding_is_a_problem(monkeypatch) -> None:
    monkeypatch.setattr(memory, "_call", lambda *_: None)  # as some sandboxes do
    assert memory.binding_problem.__wrapped__(0) == "memory bound to node 0 is not there"
