"""The small kernels' cases, FlashInfer's page tables and the processes that compile ahead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu import ahead, around
from bench.gpu.attention_flashinfer import _pages, joined
from bench.gpu.harness import Case

CPU = torch.device("cpu")

MOVED = [
    # x, residual and both results; the weight once
    pytest.param(around.norm_case, (3, 64), 4 * 3 * 64 * 2 + 64 * 2, id="norm"),
    pytest.param(around.silu_case, (3, 64), (2 + 1) * 3 * 64 * 2, id="silu"),
    # in place: each value is read and written
    pytest.param(around.rope_case, (3, 4, 2, 64, False), 2 * 3 * 6 * 64 * 2, id="rope"),
    pytest.param(around.embed_case, (3, 50, 64), 2 * 3 * 64 * 2 + 3 * 8, id="embed"),
    # rows of 512 + 64 values are read, with their slots
    pytest.param(around.mla_write_case, (3, False), 3 * (576 * 2 * 2 + 8), id="mla_write bf16"),
    pytest.param(
        around.mla_write_case, (3, True), 3 * (576 * 2 + 512 + 4 + 64 * 2 + 8), id="mla_write fp8"
    ),
    pytest.param(around.kv_write_case, (3, 2, 64), 3 * (2 * 2 * 128 * 2 + 8), id="kv_write"),
    pytest.param(around.mla_read_case, (2, 128, False), 256 * 576 * 2 * 2, id="mla_read bf16"),
    pytest.param(
        around.mla_read_case, (2, 128, True), 256 * (512 + 4 + 128 + 576 * 2), id="mla_read fp8"
    ),
    pytest.param(around.sample_case, (2, 300, "greedy"), 2 * 300 * 4, id="greedy"),
]


@pytest.mark.parametrize(("make", "sizes", "nbytes"), MOVED)
def test_a_case_moves_what_it_reads_and_writes(
    make: Any, sizes: Any, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(around, "sets_for", lambda nbytes, device: 1)
    assert make(*sizes, CPU).nbytes == nbytes


ALIKE = [
    pytest.param(around.norm_case, (2, 64), id="norm"),
    pytest.param(around.silu_case, (2, 64), id="silu"),
    pytest.param(around.embed_case, (2, 50, 64), id="embed"),
    pytest.param(around.mla_read_case, (2, 128, False), id="mla_read bf16"),
    pytest.param(around.mla_read_case, (2, 128, True), id="mla_read fp8"),
    pytest.param(around.sample_case, (2, 300, "greedy"), id="greedy"),
]


@pytest.mark.parametrize(("make", "sizes"), ALIKE)
def test_torch_computes_what_we_compute(
    make: Any, sizes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(around, "sets_for", lambda nbytes, device: 1)
    case: Case = make(*sizes, CPU)
    ours: Any = case.run()
    theirs: Any = case.peers["torch"]()
    pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
    for mine, other in pairs:
        other = other.reshape(mine.shape).float()
        torch.testing.assert_close(mine.float(), other, rtol=2e-2, atol=2e-2)


def test_a_page_table_for_flashinfer_ends_in_a_full_or_a_part_page() -> None:
    table = torch.tensor([[7, 8, 0], [5, 0, 0], [1, 2, 3]], dtype=torch.int32)
    ends, pages, last = _pages(table, torch.tensor([8, 1, 9], dtype=torch.int32), 4)
    assert ends.tolist() == [0, 2, 3, 6]
    assert pages.tolist() == [7, 8, 5, 1, 2, 3]
    assert last.tolist() == [4, 1, 1]


def test_heads_are_whole_with_the_part_that_all_share() -> None:
    q, q_rope = torch.zeros(5, 3, 4), torch.ones(5, 3, 2)
    k, k_rope, v = torch.zeros(6, 3, 4), torch.full((6, 2), 2.0), torch.zeros(6, 3, 4)
    whole_q, whole_k, same_v = joined((q, q_rope, k, k_rope, v, None))
    assert whole_q[4, 2].tolist() == [0, 0, 0, 0, 1, 1]
    assert whole_k[5, 2].tolist() == [0, 0, 0, 0, 2, 2]
    assert torch.equal(same_v, v)


class Worker:
    """A process that ends at once with ``code``, or never (None)."""

    codes: list[int | None] = []
    made: list[Worker] = []

    def __init__(self, target: Any, args: tuple[list[Any]]) -> None:
        (self.tasks,) = args
        self.exitcode = self.codes[len(self.made)]
        self.waited: list[float | None] = []
        self.killed = False
        self.made.append(self)

    def start(self) -> None:
        pass

    def join(self, seconds: float | None = None) -> None:
        self.waited.append(seconds)

    def is_alive(self) -> bool:
        return self.exitcode is None and not self.killed

    def kill(self) -> None:
        self.killed = True


def test_processes_share_the_cases_and_none_outlives_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = SimpleNamespace(Process=Worker)
    monkeypatch.setattr(Worker, "codes", [0, 1, None])
    monkeypatch.setattr(Worker, "made", [])
    monkeypatch.setattr(ahead.multiprocessing, "get_context", lambda how: context)
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 4)
    assert ahead.compile_ahead(["moe", "linear"], "cuda:0", True, 0.5) == (1, 3)
    given = sorted(task for worker in Worker.made for task in worker.tasks)
    assert given == [("linear", i, 3, "cuda:0", True) for i in range(3)] + [
        ("moe", i, 2, "cuda:0", True) for i in range(2)
    ]
    assert [worker.killed for worker in Worker.made] == [False, False, True]
    assert all(0 <= worker.waited[0] <= 0.5 for worker in Worker.made)  # type: ignore[operator]
