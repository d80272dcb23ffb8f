"""A call's inputs: the same rows whoever copies them, room for all slots, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pykernels import cpu
from pykernels.cpu.moe.plan import MoEPlan, plan
from pykernels.errors import PykernelsError
from pykernels.quant import PackedExperts, get_format
from pykernels.registry import resolve
from pykernels.shapes import MoEShape
from pykernels.target import detect
from pykernels.testing import balanced_routing, fit, poisoned, random_experts, skewed_routing
from runtime.experts.routed import RoutedExperts
from runtime.machine.topology import Topology
from runtime.workers.pool import WorkerPool, make_pool

from ..routed import SHAPE as LAYER
from ..routed import TWO_CORES, inputs, load

RAGGED = MoEShape(E=4, H=200, I=72, topk=2)

KERNELS = [
    pytest.param("auto", "fp8", "bf16", id="bf16 alone"),
    pytest.param("auto", "q4_k", "bf16", id="and sums"),
    pytest.param("auto", "int8", "int8", id="and codes, scales, sums"),
    pytest.param("generic", "q6_k", "int8", id="the same in plain Numba"),
]
LAYOUTS = {
    "contiguous": lambda x: x,
    "rows apart": lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
    "values apart": lambda x: x.T.contiguous().T,
}
TASKS = [(33, 16, 3), (32, 16, 2), (5, 1, 5), (3, 16, 1), (0, 16, 0)]
"""Tokens, tokens of a task, tasks."""


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
def test_rows_are_the_same_whoever_copies_them(name, fmt, activations, dtype):
    kernel = cpu.make_kernel(resolve(name, fmt, detect()).name, fmt, activations)
    shape = fit(RAGGED, get_format(fmt))
    experts, Hp = random_experts(shape, get_format(fmt)), -(-shape.H // 128) * 128
    for T, chunk, expected in TASKS:
        x = torch.randn(T, shape.H)
        x[:, :8] = 1 + torch.arange(1, 17, 2) / 256  # between two bfloat16: to the even one
        x = x.to(dtype)
        want, none, y = _rows(experts, kernel, x, 0)
        bits = want.view(torch.bfloat16)[:, :Hp]
        assert none == 0
        assert torch.equal(bits[:, : shape.H], x.bfloat16()) and not bits[:, shape.H :].any()
        for layout, lay in LAYOUTS.items():
            found, tasks, same = _rows(experts, kernel, lay(x), chunk)
            assert tasks == expected, (T, layout)
            assert torch.equal(found, want) and torch.equal(same, y), (T, layout)


def _bf16_call(workspace: cpu.Workspace | None = None, **kwargs) -> cpu.MoECall:
    experts = random_experts(RAGGED, get_format("bf16"))
    kernel = cpu.make_kernel("generic", "bf16")
    return cpu.MoECall(experts, kernel, workspace or cpu.Workspace(), **kwargs)


def test_a_call_of_other_tokens_is_planned_anew():
    """As many row tasks as it needs, and buffers for all its slots."""
    workspace, cut = cpu.Workspace(), MoEPlan(1, 1, row_chunk=2)
    call = _bf16_call(workspace, cut=cut)
    for T in (3, 9, 4):
        x, routing = torch.randn(T, RAGGED.H), balanced_routing(T, RAGGED)
        given = x, routing.ids, routing.weights
        call.arrange(*given, poisoned(*x.shape))
        assert call.row_tasks == (T + 1) // 2
        assert len(workspace.buffers["slot_token"]) >= routing.ids.numel()
        wanted = cpu.run_serially(_bf16_call(cut=cut), *given, poisoned(*x.shape))
        assert torch.equal(cpu.run_serially(call, *given, poisoned(*x.shape)), wanted)


@pytest.mark.parametrize("gemm_from", [1, 2, 5, 40])
def test_buffers_hold_any_distribution_of_slots(gemm_from):
    """Rows of tiles, rows of the GEMM, and its pairs of A tiles, which are each expert's own."""
    E, H, I = 3, 128, 256  # noqa: E741
    for S in (1, 6, 31, 33, 80):
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


def test_layers_of_two_sizes_share_buffers_that_fit_both():
    workspace = cpu.Workspace()
    many_tokens, wide_layer = (9, 2, 4, 128, 128, 5, None, None), (1, 2, 4, 512, 256, 5, None, None)
    workspace.reserve(*many_tokens)
    both = workspace.reserve(*wide_layer)
    assert workspace.reserve(*many_tokens) is both
    assert both["x"].shape == (9, workspace.reserve(*wide_layer)["x"].shape[1])


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor + 1], -1)[..., 0]


def test_routing_is_read_by_value_whatever_its_strides():
    x, routing = torch.randn(5, RAGGED.H), skewed_routing(5, RAGGED)
    call, ids, weights = _bf16_call(), routing.ids, routing.weights
    wanted = cpu.run_serially(call, x, ids, weights, poisoned(*x.shape))
    for given in ((_apart(ids), weights), (ids, _apart(weights)), (ids, weights.double())):
        assert torch.equal(cpu.run_serially(call, x, *given, poisoned(*x.shape)), wanted)


BAD = {
    "x of three dims": (lambda x, i, w: (x[..., None], i, w), r"x is .*\[T, 200\]"),
    "x of another width": (lambda x, i, w: (x[:, :8], i, w), r"\[T, 200\]"),
    "x of another dtype": (lambda x, i, w: (x.half(), i, w), "x is torch.float16"),
    "values of x apart": (lambda x, i, w: (x.T.contiguous().T, i, w), "Give contiguous_rows"),
    "narrow ids": (lambda x, i, w: (x, i.int(), w), "ids are torch.int32 .*Give int64 ids"),
    "ids of fewer tokens": (lambda x, i, w: (x, i[:1], w), "for 3 tokens"),
    "fewer weights than ids": (lambda x, i, w: (x, i, w[:, :1]), "Give int64 ids and weights of"),
    "complex weights": (lambda x, i, w: (x, i, w.to(torch.complex64)), "Give real weights"),
    "an expert too large": (lambda x, i, w: (x, i * 0 + 4, w), "expert 4 .. 4 in a layer of 4"),
    "an expert below zero": (lambda x, i, w: (x, i * 0 - 1, w), "expert -1"),
}


@pytest.mark.parametrize(("change", "told"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_in_one_line(change, told):
    routing, x = balanced_routing(3, RAGGED), torch.randn(3, RAGGED.H)
    x, ids, weights = change(x, routing.ids, routing.weights)
    with pytest.raises(PykernelsError, match=told):
        _bf16_call().prepare(x, ids, weights, torch.empty(3, RAGGED.H))


def _fake(given: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(given)


NO_MEMORY: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "no tensor": (torch.Tensor.tolist, "is a builtins.list, no torch tensor"),
    "sparse": (torch.Tensor.to_sparse, r"is torch.sparse_coo. Give it dense"),
    "nested": (lambda t: torch.nested.nested_tensor([t[0], t[1]]), "is nested. Give it dense"),
    "fake": (_fake, "is a FakeTensor without memory. Call them outside of tracing"),
    "meta": (lambda t: torch.empty_like(t, device="meta"), r"lies on meta. Give it on the CPU"),
}


@pytest.mark.filterwarnings("ignore")  # torch's own, of what is a prototype of its
@pytest.mark.parametrize(("make", "told"), NO_MEMORY.values(), ids=NO_MEMORY)
def test_tensors_without_memory_are_refused(make, told: str) -> None:
    with WorkerPool(1) as pool:
        routed, given = load(pool), list(inputs(3))
        for which in range(3):
            wrong = [*given[:which], make(given[which]), *given[which + 1 :]]
            for _ in range(2):  # before any call, and where a call like it has just run
                with pytest.raises(PykernelsError, match=told):
                    routed(*wrong)
                wanted = routed(*given).clone()
                assert torch.equal(routed(*given), wanted)


@pytest.mark.filterwarnings("ignore")
def test_a_result_without_memory_is_refused() -> None:
    with WorkerPool(1) as pool:
        routed, given = load(pool), inputs(3)
        with FakeTensorMode(allow_non_fake_inputs=True):
            with pytest.raises(PykernelsError, match="y of the CPU experts is a FakeTensor"):
                routed(*given)
        wanted = routed(*given).clone()
        with FakeTensorMode(allow_non_fake_inputs=True):
            routed(*given)  # into the buffer that was there; the next call's would be a fake one
        assert torch.equal(routed(*given), wanted)


def _negated(given: torch.Tensor) -> torch.Tensor:
    """The same values, as the imaginary halves of conjugates."""
    view = torch.complex(torch.zeros_like(given), -given).conj().imag
    assert view.is_neg() and torch.equal(view, given)
    return view


@pytest.mark.parametrize("shape", [(1, 1), (3, 2)], ids=str)
def test_negated_views_are_read_by_value(shape: tuple[int, int]) -> None:
    T, topk = shape
    with WorkerPool(1) as pool:
        routed, (x, ids, weights) = load(pool), inputs(T)
        x, ids, weights = x.float(), ids[:, :topk].contiguous(), weights[:, :topk].contiguous()
        wanted = load(pool)(x, ids, weights)
        for given in ((_negated(x), ids, weights), (x, ids, _negated(weights))):
            assert torch.equal(routed(*given), wanted)
            assert torch.equal(routed(x, ids, weights), wanted)
        flat = torch._neg_view(-x), torch._neg_view(-ids), torch._neg_view(-weights)
        assert torch.equal(load(pool)(*flat), wanted)


POOLS = {
    "every core": lambda: WorkerPool(Topology.detect().usable),
    "the driver only waits": lambda: WorkerPool(1, driver_works=False),
    "two nodes": lambda: make_pool(numa="2", topology=Topology.fake(2)),
}


@pytest.mark.parametrize("name", [*list(POOLS)[:2], pytest.param("two nodes", marks=TWO_CORES)])
def test_x_may_change_after_submit(name):
    many = 2 * (1 << 17) // LAYER.H  # more values than the driver copies, on either node
    with POOLS[name]() as pool:
        experts = random_experts(LAYER, get_format("fp8"))
        routed = RoutedExperts(LAYER, "fp8", pool)
        for e in range(LAYER.E):
            routed.load_expert(e, *experts.unpack(e))
        parts = [part._moe for part in routed._bind()]
        for T in (many, 2):
            routing, x = skewed_routing(T, LAYER, seed=T), torch.randn(T, LAYER.H)
            serial = torch.zeros_like(x)
            for call in parts:  # the same cut, but the driver copies
                cut = plan(call.experts.shape, experts.fmt, 1, T, routed.gemm_from)
                cut = replace(cut, row_chunk=0)
                alone = cpu.MoECall(call.experts, call.kernel, cpu.Workspace(), cut=cut)
                out = torch.empty_like(x)
                serial += cpu.run_serially(alone, x, routing.ids, routing.weights, out)
            for lay in LAYOUTS.values():
                ticket = routed.submit(given := lay(x).clone(), routing.ids, routing.weights)
                given.fill_(float("nan"))
                assert torch.equal(routed.sync(ticket), serial)
                assert all((call.row_tasks > 0) == (T == many) for call in parts)
