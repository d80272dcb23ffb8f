"""Inputs on their way in: the same rows whoever copies them, and x is the caller's after submit."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from pykernels import cpu
from pykernels.cpu.jit import task
from pykernels.cpu.moe.plan import MoEPlan, plan
from pykernels.errors import PykernelsError
from pykernels.quant import PackedExperts, get_format
from pykernels.registry import resolve
from pykernels.shapes import MoEShape
from pykernels.target import detect
from pykernels.testing import balanced_routing, fit, poisoned, random_experts, skewed_routing
from runtime.experts.routed import RoutedExperts
from runtime.machine.topology import Topology
from runtime.workers.pool import Pool, TaskError, WorkerPool, make_pool

USABLE = Topology.detect().usable
PHYSICAL = len(Topology.detect().physical)
RAGGED = MoEShape(E=4, H=200, I=72, topk=2)

KERNELS = [
    pytest.param("auto", "fp8", "bf16", id="nothing but bf16"),
    pytest.param("auto", "q4_k", "bf16", id="and sums"),
    pytest.param("auto", "int8", "int8", id="and codes, scales, sums"),
    pytest.param("generic", "q6_k", "int8", id="the same in plain Numba"),
]
LAYOUTS = {
    "contiguous": lambda x: x,
    "rows apart": lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
    "values apart": lambda x: x.T.contiguous().T,
}
CUTS = [
    pytest.param(33, 16, 3, id="a token more than two runs"),
    pytest.param(32, 16, 2, id="whole runs"),
    pytest.param(5, 1, 5, id="a token each"),
    pytest.param(3, 16, 1, id="less than a run"),
    pytest.param(0, 16, 0, id="no tokens"),
]


def _rows(experts: PackedExperts, kernel, x: torch.Tensor, row_chunk: int) -> tuple:
    """The bytes of the rows, where they were 255 before the call; row tasks; and its result."""
    routing, workspace = balanced_routing(len(x), experts.shape), cpu.Workspace()
    call = cpu.MoECall(experts, kernel, workspace, cut=MoEPlan(1, 1, row_chunk=row_chunk))
    y = poisoned(*x.shape)
    args = cpu.contiguous_rows(x), routing.ids, routing.weights, y
    tasks = call.prepare(*args).row_tasks
    workspace.buffers["x"].fill_(255)
    cpu.run_serially(call, x, *args[1:])
    return workspace.buffers["x"].clone(), tasks, y


@pytest.mark.parametrize(("name", "fmt", "activations"), KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_the_same_bytes_whoever_copies_them(name, fmt, activations, dtype):
    kernel = cpu.make_kernel(resolve(name, fmt, detect()).name, fmt, activations)
    shape = fit(RAGGED, get_format(fmt))
    experts, Hp = random_experts(shape, get_format(fmt)), -(-shape.H // 128) * 128
    for case in CUTS:
        T, chunk, expected_tasks = case.values
        x = torch.randn(T, shape.H)
        x[:, :8] = 1 + torch.arange(1, 17, 2) / 256  # between two bfloat16: to the even one
        x = x.to(dtype)
        want, none, y = _rows(experts, kernel, x, 0)
        bits = want.view(torch.bfloat16)[:, :Hp]
        assert none == 0
        assert torch.equal(bits[:, : shape.H], x.bfloat16()) and not bits[:, shape.H :].any()
        for layout, lay in LAYOUTS.items():
            got, tasks, same = _rows(experts, kernel, lay(x), chunk)
            assert tasks == expected_tasks, (case.id, layout)
            assert torch.equal(got, want), (case.id, layout)
            assert torch.equal(same, y), (case.id, layout)


def test_values_apart_are_refused_where_nobody_would_keep_a_copy():
    experts = random_experts(RAGGED, get_format("bf16"))
    call = cpu.MoECall(experts, cpu.make_kernel("generic", "bf16"), cpu.Workspace())
    x, routing = torch.randn(RAGGED.H, 3).T, balanced_routing(3, RAGGED)
    with pytest.raises(PykernelsError, match=r"lie apart.*contiguous_rows"):
        call.prepare(x, routing.ids, routing.weights, torch.empty(3, RAGGED.H))


def test_a_call_of_other_tokens_than_the_last_is_planned_and_given_room_anew():
    """As many row tasks as it needs, and buffers for all its slots."""
    experts, kernel = random_experts(RAGGED, get_format("bf16")), cpu.make_kernel("generic", "bf16")
    workspace, cut = cpu.Workspace(), MoEPlan(1, 1, row_chunk=2)
    call = cpu.MoECall(experts, kernel, workspace, cut=cut)
    for T in (3, 9, 4):
        x, routing = torch.randn(T, RAGGED.H), balanced_routing(T, RAGGED)
        given = x, routing.ids, routing.weights
        call.arrange(*given, poisoned(*x.shape))
        assert call.row_tasks == (T + 1) // 2
        assert len(workspace.buffers["x"]) >= T
        assert len(workspace.buffers["slot_token"]) >= routing.ids.numel()
        alone = cpu.MoECall(experts, kernel, cpu.Workspace(), cut=cut)
        wanted = cpu.run_serially(alone, *given, poisoned(*x.shape))
        assert torch.equal(cpu.run_serially(call, *given, poisoned(*x.shape)), wanted)


@pytest.mark.parametrize("gemm_from", [1, 2, 5, 40])
def test_there_is_room_however_slots_fall_to_experts(gemm_from):
    """Rows of tiles, rows of the GEMM, and its pairs of A tiles, which are each expert's own."""
    E, H, I = 3, 128, 256  # noqa: E741
    for S in (1, 6, 7, 31, 33, 80):
        room = cpu.Workspace().reserve(S, 1, E, H, I, gemm_from, None, None)
        for first, second in product(range(S + 1), repeat=2):
            counts = [first, second, S - first - second]
            if counts[2] < 0:
                continue
            many = [n for n in counts if n >= gemm_from]
            assert len(room["h"]) >= S - sum(many)
            assert len(room["h_gemm"]) >= sum(many)
            groups = sum(2 * -(-n // 32) for n in many)
            assert len(room["x_tiles"]) >= groups * 16 * H
            assert len(room["h_tiles"]) >= groups * 16 * I


def test_layers_that_take_turns_keep_the_room_that_both_need():
    workspace = cpu.Workspace()
    many_tokens, wide_layer = (9, 2, 4, 128, 128, 5, None, None), (1, 2, 4, 512, 256, 5, None, None)
    workspace.reserve(*many_tokens)
    both = workspace.reserve(*wide_layer)
    assert workspace.reserve(*many_tokens) is both
    assert both["x"].shape == (9, workspace.reserve(*wide_layer)["x"].shape[1])


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor + 1], -1)[..., 0]


def test_routing_counts_as_it_reads_however_it_lies():
    experts, kernel = random_experts(RAGGED, get_format("bf16")), cpu.make_kernel("generic", "bf16")
    x, routing = torch.randn(5, RAGGED.H), skewed_routing(5, RAGGED)
    call = cpu.MoECall(experts, kernel, cpu.Workspace())
    ids, weights = routing.ids, routing.weights
    wanted = cpu.run_serially(call, x, ids, weights, poisoned(*x.shape))
    for given in ((_apart(ids), weights), (ids, _apart(weights)), (ids, weights.double())):
        assert torch.equal(cpu.run_serially(call, x, *given, poisoned(*x.shape)), wanted)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda x, w: (x[..., None], w), "x is"),
        (lambda x, w: (x[0], w), "x is"),
        (lambda x, w: (x, w[:, :1]), "Give int64 ids and weights of shape"),
        (lambda x, w: (x, w.to(torch.complex64)), "Give real weights"),
    ],
    ids=["x of three dims", "x of one", "fewer weights than ids", "complex weights"],
)
def test_what_fits_in_part_is_refused(change, told):
    experts, kernel = random_experts(RAGGED, get_format("bf16")), cpu.make_kernel("generic", "bf16")
    routing, x = balanced_routing(3, RAGGED), torch.randn(3, RAGGED.H)
    x, weights = change(x, routing.weights)
    with pytest.raises(PykernelsError, match=told):
        cpu.MoECall(experts, kernel, cpu.Workspace()).check(x, routing.ids, weights)


DEEPSEEK = MoEShape(E=256, H=7168, I=2048, topk=8)
EMBEDDED = MoEShape(E=32, H=256, I=128, topk=6)


@pytest.mark.parametrize(
    ("shape", "T", "threads", "row_chunk"),
    [
        pytest.param(DEEPSEEK, 1, 16, 0, id="decoding: the driver"),
        pytest.param(DEEPSEEK, 8, 16, 0, id="a small batch: the driver"),
        pytest.param(EMBEDDED, 512, 2, 0, id="short rows: the driver"),
        pytest.param(DEEPSEEK, 32, 16, 1, id="as many tasks as keep all threads busy"),
        pytest.param(DEEPSEEK, 1024, 16, 16, id="a prompt"),
        pytest.param(DEEPSEEK, 8192, 2, 16, id="a long one: no longer tasks"),
    ],
)
def test_the_driver_copies_what_is_little(shape, T, threads, row_chunk):
    assert plan(shape, get_format("fp8"), threads, T).row_chunk == row_chunk


SHAPE = MoEShape(E=8, H=512, I=256, topk=2)
MANY = (
    257  # tokens: x is above what the driver copies, and on up to 4 threads one more than 16 runs
)
POOLS = {
    "one thread, the driver's": lambda: WorkerPool(1),
    "every core": lambda: WorkerPool(USABLE),
    "the driver only waits": lambda: WorkerPool(1, driver_works=False),
    "asleep at once": lambda: WorkerPool(USABLE, spin_us=0.0),
    "two nodes": lambda: make_pool(numa="2", topology=Topology.fake(2)),
}


@pytest.fixture(params=POOLS)
def pool(request):
    if request.param == "two nodes" and PHYSICAL < 2:
        pytest.skip("two made-up nodes need two cores")
    with POOLS[request.param]() as pool:
        yield pool


def _load(pool: Pool, fmt: str, activations: str) -> tuple[RoutedExperts, PackedExperts]:
    experts = random_experts(SHAPE, get_format(fmt))
    routed = RoutedExperts(SHAPE, fmt, pool, activations=activations)
    for e in range(SHAPE.E):
        routed.load_expert(e, *experts.unpack(e))
    return routed, experts


@pytest.mark.parametrize(("fmt", "activations"), [("fp8", "bf16"), ("int8", "int8")])
def test_after_submit_x_may_change_however_many_tokens(pool, fmt, activations):
    routed, experts = _load(pool, fmt, activations)
    parts = [part._moe for part in routed._bind()]
    for T in (MANY, 2, MANY + 1):
        routing = skewed_routing(T, SHAPE, seed=T)
        x = torch.randn(T, SHAPE.H)
        for lay in LAYOUTS.values():
            ticket = routed.submit(given := lay(x).clone(), routing.ids, routing.weights)
            given.fill_(float("nan"))
            y = routed.sync(ticket)
            assert all((call.row_tasks > 0) == (T >= MANY) for call in parts)
            serial = torch.zeros_like(x)
            for call in parts:  # the same cut, but the driver copies
                cut = plan(call.experts.shape, experts.fmt, 1, T, routed.gemm_from)
                alone = cpu.MoECall(
                    call.experts, call.kernel, cpu.Workspace(), cut=replace(cut, row_chunk=0)
                )
                serial += cpu.run_serially(
                    alone, x, routing.ids, routing.weights, torch.empty_like(x)
                )
            assert torch.equal(y, serial)


def test_a_failing_task_names_its_stage_and_no_expert(pool):
    routed, _ = _load(pool, "fp8", "bf16")
    routing, x = balanced_routing(MANY, SHAPE), torch.randn(MANY, SHAPE.H)
    good = routed(x, routing.ids, routing.weights)
    part = routed._bind()[-1]
    job = part._moe.job
    kernel, job["run_rows"] = int(job["run_rows"][0]), _broken().address
    ticket = routed.submit(x, routing.ids, routing.weights)  # returns all the same
    with pytest.raises(TaskError, match="^rows task 3 failed with status 77$"):
        routed.sync(ticket)
    job["run_rows"] = kernel
    assert torch.equal(routed(x, routing.ids, routing.weights), good)


def _broken():
    @task("broken-rows")
    def broken(job_address, index, worker):
        return 77 if index == 3 else 0

    return broken
