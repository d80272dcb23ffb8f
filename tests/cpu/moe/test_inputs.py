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
    routing, workspace = balanced_routing(len(x), experts.shape), cpu.MoEWorkspace()
    call = cpu.MoECall(experts, kernel, workspace, moe_plan=MoEPlan(1, 1, row_chunk=row_chunk))
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


@pytest.mark.parametrize("gemm_from", [1, 2, 5, 40])
def test_buffers_hold_any_distribution_of_slots(gemm_from):
    """Rows of tiles, rows of the GEMM, and its pairs of A tiles, which are each expert's own."""
    E, H, I = 3, 128, 256  # noqa: E741
    for S in (1, 6, 31, 33, 80):
        room = cpu.MoEWorkspace().reserve(S, 1, E, H, I, gemm_from, None, None, None)
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


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor + 1], -1)[..., 0]


def _negated(given: torch.Tensor) -> torch.Tensor:
    """The same values, as the imaginary halves of conjugates."""
    view = torch.complex(torch.zeros_like(given), -given).conj().imag
    assert view.is_neg() and torch.equal(view, given)
    return view


CHANGES: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "x is float32": lambda x, ids, w: (x.float(), ids, w),
    "values of x apart": lambda x, ids, w: (_apart(x), ids, w),
    "rows of x apart": lambda x, ids, w: (torch.cat([x, x], 1)[:, : LAYER.H], ids, w),
    "x negated": lambda x, ids, w: (_negated(x.float()), ids, w),
    "ids apart": lambda x, ids, w: (x, _apart(ids), w),
    "weights apart": lambda x, ids, w: (x, ids, _apart(w)),
    "weights negated": lambda x, ids, w: (x, ids, _negated(w)),
    "weights are float64": lambda x, ids, w: (x, ids, w.double()),
    "fewer tokens": lambda x, ids, w: (x[:2], ids[:2], w[:2]),
    "no token": lambda x, ids, w: (x[:0], ids[:0], w[:0]),
    "no expert": lambda x, ids, w: (x, ids[:, :0], w[:, :0]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(("T", "topk"), [(1, 1), (3, 2)])
def test_inputs_are_read_by_value_whatever_the_last_layout_was(change, T, topk, pool):
    def given(seed: int) -> tuple[torch.Tensor, ...]:
        x, ids, weights = inputs(T, seed)
        return x, ids[:, :topk].contiguous(), weights[:, :topk].contiguous()

    plain, other = given(0), change(*given(1))
    wanted = load(pool)(*plain), load(pool)(*(t.resolve_neg().contiguous() for t in other))
    routed, which = load(pool), (0, 0, 1, 1, 0)
    results = [routed(*(plain, other)[i]) for i in which]
    assert results[2].numel() == 0 or len({y.data_ptr() for y in results}) == len(which)
    for i, y in zip(which, results, strict=True):
        assert y.dtype is (plain, other)[i][0].dtype and torch.equal(y, wanted[i])


BAD: list[tuple[Callable[..., tuple], str]] = [
    (lambda x, i, w: (x[..., None], i, w), r"x is .*\[T, 128\]"),
    (lambda x, i, w: (x[:, :8], i, w), r"\[T, 128\]"),
    (lambda x, i, w: (x.half(), i, w), "x is torch.float16"),
    (lambda x, i, w: (x, i.int(), w), "ids are torch.int32 .*Give int64 ids"),
    (lambda x, i, w: (x, i[:1], w), "for 3 tokens"),
    (lambda x, i, w: (x, i, w[:, :1]), "Give int64 ids and weights of"),
    (lambda x, i, w: (x, i, w + 0j), "weights are torch.complex64.*Give real weights"),
    (lambda x, i, w: (x, i * 0 + 6, w), "expert 6 .. 6 in a layer of 6"),
    (lambda x, i, w: (x, i * 0 - 2, w), "expert -2"),
]
NO_MEMORY: dict[str, Callable[[torch.Tensor], object]] = {
    "is a builtins.list, no torch tensor": torch.Tensor.tolist,
    "is torch.sparse_coo. Give it dense": torch.Tensor.to_sparse,
    "is nested. Give it dense": lambda t: torch.nested.nested_tensor([t[0], t[1]]),
    "is a FakeTensor without memory. Call": lambda t: FakeTensorMode().from_tensor(t),
    "lies on meta. Give it on the CPU": lambda t: t.to("meta"),
}
for name, at in (("x", 0), ("ids", 1), ("weights", 2)):
    for told, make in NO_MEMORY.items():
        spoil = lambda *t, at=at, make=make: (*t[:at], make(t[at]), *t[at + 1 :])  # noqa: E731
        BAD.append((spoil, f"{name} .*{told}"))


@pytest.mark.filterwarnings("ignore")  # torch's own, of what is a prototype of its
@pytest.mark.parametrize(("change", "told"), BAD, ids=[told for _, told in BAD])
def test_bad_input_is_refused_and_the_next_call_is_right(change, told, pool):
    routed, given = load(pool), inputs(3)
    wanted = load(pool)(*given)
    for _ in range(2):  # before any call, and where a call like it has just run
        with pytest.raises(PykernelsError, match=told):
            routed(*change(*given))
        assert torch.equal(routed(*given), wanted) and torch.equal(routed(*given), wanted)
    assert routed.counters.calls == 4


def test_a_call_is_given_contiguous_rows():
    routing, x = balanced_routing(3, RAGGED), torch.randn(RAGGED.H, 3).T
    experts = random_experts(RAGGED, get_format("bf16"))
    call = cpu.MoECall(experts, cpu.make_kernel("generic", "bf16"), cpu.MoEWorkspace())
    with pytest.raises(PykernelsError, match="Give contiguous_rows"):
        call.prepare(x, routing.ids, routing.weights, torch.empty(3, RAGGED.H))


POOLS = {
    "every core": lambda: WorkerPool(Topology.detect().usable),
    "the driver only waits": lambda: WorkerPool(1, driver_works=False),
    "two nodes": lambda: make_pool(numa="2", topology=Topology.fake(2)),
}


@pytest.mark.parametrize("name", [*list(POOLS)[:2], pytest.param("two nodes", marks=TWO_CORES)])
def test_inputs_may_be_freed_after_submit(name):
    many = 2 * (1 << 17) // LAYER.H  # more values than the driver copies, on either node
    with POOLS[name]() as pool:
        experts = random_experts(LAYER, get_format("fp8"))
        routed = RoutedExperts(LAYER, "fp8", pool)
        for e in range(LAYER.E):
            routed.load_expert(e, *experts.unpack(e))
        parts = [part.call for part in routed._bind().slices]
        for T in (many, 2):
            routing, x = skewed_routing(T, LAYER, seed=T), torch.randn(T, LAYER.H)
            serial = torch.zeros_like(x)
            for call in parts:  # the same cut, but the driver copies
                cut = plan(call.experts.shape, experts.fmt, 1, T, routed.gemm_from)
                cut = replace(cut, row_chunk=0)
                alone = cpu.MoECall(call.experts, call.kernel, cpu.MoEWorkspace(), moe_plan=cut)
                out = torch.empty_like(x)
                serial += cpu.run_serially(alone, x, routing.ids, routing.weights, out)
            for lay in LAYOUTS.values():
                ticket = routed.submit(
                    lay(x).clone(), routing.ids.clone(), routing.weights.double()
                )
                assert torch.equal(routed.sync(ticket), serial)
                assert all((call.row_tasks > 0) == (T == many) for call in parts)
