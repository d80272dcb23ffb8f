"""The GPU's routed experts against float64, no further off than torch's own bfloat16 is."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from pykernels import ref
from pykernels.errors import PykernelsError
from pykernels.gpu.gemm.tiles import block_bound
from pykernels.gpu.moe import fused_moe
from pykernels.gpu.moe.permute import permute
from pykernels.gpu.plans.gemm import GemmPlan
from pykernels.gpu.quantize import quantize_fp8
from pykernels.quant import Format, get_format
from pykernels.ref.linear import dequantize_fp8
from pykernels.ref.linear import quantize_fp8 as quantize_reference
from pykernels.shapes import MoEShape, Routing
from pykernels.testing import balanced_routing, one_expert_routing, relative_error, skewed_routing

SMALL = MoEShape(E=5, H=128, I=192, topk=2)
FORMATS = (
    "bf16",
    "fp8",
    "int8",
    "int8-channel",
    "int4",
    "int4-g128",
    "int4-channel",
    "q4_k",
    "q6_k",
)


def random_experts(shape: MoEShape, fmt: Format, device: torch.device) -> fused_moe.Experts:
    sizes = ((shape.I, shape.H), (shape.I, shape.H), (shape.H, shape.I))
    weights = [
        tuple(fmt.quantize(torch.randn(N, K) / K**0.5) for N, K in sizes) for _ in range(shape.E)
    ]
    return fused_moe.Experts.pack(fmt, weights, device)


def native(x: torch.Tensor, routing: Routing, experts: fused_moe.Experts) -> torch.Tensor:
    """What torch makes of it in bfloat16, from the weights dequantized to bfloat16."""
    y = torch.zeros(x.shape, dtype=torch.float32)
    for e in routing.ids.unique().tolist():
        gate, up, down = (experts.fmt.dequantize(w).bfloat16() for w in experts.unpack(e))
        tokens, ranks = torch.where(routing.ids == e)
        rows = x[tokens].bfloat16()
        h = F.silu(rows @ gate.T) * (rows @ up.T)
        y.index_add_(0, tokens, (h @ down.T).float() * routing.weights[tokens, ranks, None])
    return y.bfloat16()


def check(
    x: torch.Tensor,
    routing: Routing,
    experts: fused_moe.Experts,
    device: torch.device,
    activations: str = "bf16",
    **how: object,
) -> torch.Tensor:
    """Fails if the result is further from float64 than torch's own bfloat16, with some slack."""
    y = fused_moe.moe_ffn(
        x.to(device),
        routing.ids.to(device),
        routing.weights.to(device),
        experts,
        activations=activations,
        **how,  # type: ignore[arg-type]
    )
    args = (x, routing.ids, routing.weights, experts)
    truth = ref.moe_ffn(*args, dtype=torch.float64, activations=activations)
    exact = truth if activations == "bf16" else ref.moe_ffn(*args, dtype=torch.float64)
    # E4M3 inputs of the second product: a sum that rounds to another bfloat16 moves a whole code.
    slack = 1.3 if activations == "bf16" else 4
    assert relative_error(y.cpu(), truth) <= slack * relative_error(
        native(x, routing, experts), exact
    )
    return y


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_as_near_as_torchs_bfloat16(name: str, device: torch.device) -> None:
    K_quant = name.endswith("_k")
    shape = replace(SMALL, E=3, H=256, I=256) if K_quant else SMALL
    experts = random_experts(shape, get_format(name), device)
    x = torch.randn(7, shape.H).bfloat16()
    check(x, skewed_routing(7, shape), experts, device)


CASES = [
    ("one token", 1, skewed_routing),
    ("experts without tokens, others with several blocks", 19, skewed_routing),
    ("every token to the same experts", 17, one_expert_routing),
    ("blocks that are just full", 40, balanced_routing),
]


@pytest.mark.parametrize(("why", "T", "route"), CASES, ids=[case[0] for case in CASES])
@pytest.mark.parametrize("path", ["bf16", "int4", "fp8"])
def test_routings(path: str, why: str, T: int, route: object, device: torch.device) -> None:
    experts = random_experts(SMALL, get_format(path), device)
    x = torch.randn(T, SMALL.H).bfloat16()
    activations = "fp8" if path == "fp8" else "bf16"
    check(x, route(T, SMALL), experts, device, activations)  # type: ignore[operator]


PLANS = [
    ("bf16", "bf16", GemmPlan(16, 64, 64, group_m=1), "inputs no multiple of block_k: masked"),
    ("bf16", "bf16", GemmPlan(16, 64, 64, tma=True), "descriptors, ragged in every direction"),
    ("bf16", "bf16", GemmPlan(32, 128, 32, tma=True), "tiles wider than the matrix"),
    ("fp8", "fp8", GemmPlan(16, 32, 128, tma=True), "descriptors of E4M3"),
    ("bf16", "bf16", GemmPlan(16, 64, 64, tma=True, copy=True), "rows copied first"),
    ("fp8", "fp8", GemmPlan(16, 32, 128, tma=True, copy=True), "rows of E4M3 copied first"),
    ("fp8", "fp8", GemmPlan(16, 128, 128, group_m=2), "one scale block a tile"),
    ("fp8", "fp8", GemmPlan(16, 256, 128), "several scale blocks a tile"),
    ("int8", "bf16", GemmPlan(32, 64, 128), "several steps of decoding in one"),
]


@pytest.mark.parametrize(("name", "activations", "plan", "why"), PLANS, ids=[p[3] for p in PLANS])
def test_plans(name: str, activations: str, plan: GemmPlan, why: str, device: torch.device) -> None:
    shape = MoEShape(E=3, H=192, I=160 if name == "bf16" else 192, topk=2)
    experts = random_experts(shape, get_format(name), device)
    x = torch.randn(21, shape.H).bfloat16()
    routing = skewed_routing(21, shape)
    check(x, routing, experts, device, activations, plans=(plan, plan))


def test_a_slot_table_is_all_that_says_where_experts_lie(device: torch.device) -> None:
    stacked = random_experts(replace(SMALL, E=3), get_format("int4"), device)
    table = torch.tensor([2, 0, -1, 1, 2], dtype=torch.int32, device=device)  # 2: lies nowhere
    experts = stacked.with_slots(table)
    x = torch.randn(9, SMALL.H).bfloat16()
    routing = skewed_routing(9, SMALL)
    there = routing.ids != 2
    y = fused_moe.moe_ffn(x.to(device), routing.ids.to(device), routing.weights.to(device), experts)
    weights = torch.where(there, routing.weights, 0.0)
    truth = ref.moe_ffn(x, routing.ids.where(there, 0), weights, experts, dtype=torch.float64)
    assert relative_error(y.cpu(), truth) < 8e-3
    left_out = ref.moe_ffn(x, routing.ids, routing.weights, experts, dtype=torch.float64)
    assert torch.equal(left_out, truth)
    with pytest.raises(PykernelsError, match="expert 2 of 5 is in no slot"):
        experts.unpack(2)


def test_ids_of_no_expert_contribute_nothing(device: torch.device) -> None:
    experts = random_experts(SMALL, get_format("bf16"), device)
    x, routing = torch.randn(6, SMALL.H).bfloat16(), balanced_routing(6, SMALL)
    ids = routing.ids.clone()
    ids[0], ids[3, 1] = -1, SMALL.E
    there = (ids >= 0) & (ids < SMALL.E)
    given = routing.weights.masked_fill(~there, torch.nan).to(device)  # padding may have any
    y = fused_moe.moe_ffn(x.to(device), ids.to(device), given, experts)
    weights = torch.where(there, routing.weights, 0.0)
    truth = ref.moe_ffn(x, ids.where(there, 0), weights, experts, dtype=torch.float64)
    assert relative_error(y.cpu(), truth) < 8e-3
    assert not y[0].any()


def test_a_layer_of_one_expert(device: torch.device) -> None:
    shape = MoEShape(E=1, H=64, I=64, topk=1)
    for name in ("bf16", "int8"):
        experts = random_experts(shape, get_format(name), device)
        check(torch.randn(3, 64).bfloat16(), one_expert_routing(3, shape), experts, device)


def test_inputs_that_begin_anywhere(device: torch.device) -> None:
    """A row of a larger tensor at an odd address: no descriptor can begin there."""
    experts = random_experts(replace(SMALL, E=2), get_format("bf16"), device)
    room = torch.randn(3 * SMALL.H + 1, device=device).bfloat16()
    x = room[1:].view(3, SMALL.H)
    routing = one_expert_routing(3, replace(SMALL, E=2))
    args = (routing.ids.to(device), routing.weights.to(device), experts)
    plan = GemmPlan(16, 64, 64, tma=True)
    odd = fused_moe.moe_ffn(x, *args, plans=(plan, plan))
    assert torch.equal(odd, fused_moe.moe_ffn(x.clone(), *args, plans=(plan, plan)))


def test_rows_at_odd_addresses_have_plans_of_their_own(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = random_experts(SMALL, get_format("bf16"), device)
    order = fused_moe.sort_slots(one_expert_routing(3, SMALL).ids.to(device), SMALL.E)
    asked = []

    def choose(*sizes: object) -> GemmPlan:
        asked.append(sizes[-1])
        return GemmPlan(16, 64, 64)

    monkeypatch.setattr(fused_moe, "select", choose)
    rows = len(order.slots)
    h = torch.randn(rows * SMALL.I + 1, device=device).bfloat16()[1:].view(rows, SMALL.I)
    assert torch.equal(fused_moe.down(h, experts, order), fused_moe.down(h.clone(), experts, order))
    assert asked == [False, True]


def test_no_tokens(device: torch.device) -> None:
    experts = random_experts(SMALL, get_format("bf16"), device)
    empty = torch.empty(0, SMALL.H, dtype=torch.bfloat16, device=device)
    routing = balanced_routing(0, SMALL)
    y = fused_moe.moe_ffn(empty, routing.ids.to(device), routing.weights.to(device), experts)
    assert y.shape == (0, SMALL.H)


def test_every_row_is_written_once_and_nothing_behind(device: torch.device) -> None:
    experts = random_experts(SMALL, get_format("bf16"), device)
    T = 11
    x = torch.randn(T, SMALL.H).bfloat16().to(device)
    order = fused_moe.sort_slots(skewed_routing(T, SMALL).ids.to(device), SMALL.E)
    room = torch.full((T * 2 + 4, SMALL.I), float("nan"), dtype=torch.bfloat16, device=device)
    fused_moe.gate_up(x, experts, order, out=room[: T * 2])
    assert room[: T * 2].isfinite().all() and room[T * 2 :].isnan().all()


def test_packing_for_the_gpu_loses_nothing(device: torch.device) -> None:
    for name in FORMATS:
        fmt = get_format(name)
        weight = fmt.quantize(torch.randn(24, 512))
        stack = fused_moe.pack_for_gpu(fmt, [weight, weight])
        again = fused_moe.unpack_from_gpu(fmt, stack, 1)
        assert torch.equal(weight.data.view(torch.uint8), again.data.view(torch.uint8)), name
        if weight.scale is not None:
            assert again.scale is not None and torch.equal(weight.scale, again.scale), name


@pytest.mark.parametrize("name", FORMATS)
def test_empty_slots_are_as_large_as_what_is_packed(name: str, device: torch.device) -> None:
    fmt, (N, K) = get_format(name), (136, 256 if name.endswith("_k") else 192)
    packed = fused_moe.pack_for_gpu(fmt, [fmt.quantize(torch.randn(N, K))] * 3)
    empty = fused_moe.empty_for_gpu(fmt, 3, N, K, device)
    assert (empty.N, empty.K, empty.group) == (N, K, packed.group)
    for mine, theirs in ((empty.data, packed.data), (empty.scale, packed.scale)):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)


@pytest.mark.parametrize("K", [128, 320], ids=["whole groups", "a ragged last group"])
def test_activations_quantize_as_the_reference_does(K: int, device: torch.device) -> None:
    x = torch.randn(21, K) * torch.logspace(-4, 3, 21)[:, None]
    x[3], x[4, :128] = 0, 0
    x[5, 0] = 1e30  # everything else of its group becomes 0
    codes, scales = quantize_fp8(x.bfloat16().to(device))
    expected, expected_scales = quantize_reference(x.bfloat16())
    assert torch.allclose(scales.cpu(), expected_scales, rtol=1e-6)
    # A quotient that is rounded otherwise moves a code now and then.
    moved = codes.cpu().view(torch.uint8) != expected.view(torch.uint8)
    assert moved.float().mean() < 2e-3
    error = relative_error(dequantize_fp8(codes.cpu(), scales.cpu()), x.bfloat16())
    assert error <= 1.01 * relative_error(dequantize_fp8(expected, expected_scales), x.bfloat16())


def test_what_is_no_number_has_no_part_in_a_scale(device: torch.device) -> None:
    x = torch.randn(3, 256).bfloat16()
    x[0, 5], x[1, :128] = torch.nan, torch.nan
    codes, scales = quantize_fp8(x.to(device))
    expected, expected_scales = quantize_reference(x)
    assert torch.equal(codes.cpu().float().isnan(), x.isnan())
    assert torch.equal(expected.float().isnan(), x.isnan())
    torch.testing.assert_close(scales.cpu(), expected_scales, rtol=1e-6, atol=0)
    assert scales[1, 0] == 1


def test_a_group_too_small_for_a_scale_has_the_scale_one(device: torch.device) -> None:
    """A 448th of its largest is no float32 any more but 0, and nothing divided by 0 is a number."""
    x = torch.zeros(2, 256)
    x[0, 3], x[1, 130] = 1e-43, -1e-40
    codes, scales = quantize_fp8(x.to(device))
    expected, expected_scales = quantize_reference(x)
    assert torch.equal(codes.cpu().float(), expected.float())
    assert torch.equal(scales.cpu(), expected_scales)
    assert scales[0].eq(1).all() and codes[0].float().eq(0).all()
    assert 0 < scales[1, 1] < 1e-42 and codes[1].float().isfinite().all()


def test_activations_quantize_into_the_experts_order(device: torch.device) -> None:
    x = torch.randn(21, 192).bfloat16().to(device)
    ids = skewed_routing(21, SMALL).ids
    ids[3], ids[7, 1] = -1, SMALL.E
    order = fused_moe.sort_slots(ids.to(device), SMALL.E)
    codes, scales = quantize_fp8(x)
    sorted_codes, sorted_scales = quantize_fp8(x, order)
    assert torch.equal(sorted_codes.view(torch.uint8), permute(codes, order).view(torch.uint8))
    assert torch.equal(sorted_scales, permute(scales, order))


def test_more_blocks_than_the_bound_never_come(device: torch.device) -> None:
    for _ in range(200):
        E, block = int(torch.randint(1, 9, ())), 2 ** int(torch.randint(0, 5, ()))
        counts = torch.randint(0, 40, (E,)) * torch.randint(0, 2, (E,))
        assert int((-(-counts // block)).sum()) <= block_bound(int(counts.sum()), E, block)


REFUSED = [
    ("q5_k has no GPU layout", "fmt"),
    ("int4 weights are not multiplied with fp8", "activations"),
    ("the inputs are torch.float32", "dtype"),
    ("the slot table is torch.int64", "table"),
]


@pytest.mark.parametrize(("cause", "what"), REFUSED, ids=[row[1] for row in REFUSED])
def test_what_no_kernel_takes_is_refused(cause: str, what: str, device: torch.device) -> None:
    with pytest.raises(PykernelsError, match=cause):
        if what == "fmt":
            random_experts(replace(SMALL, H=256, I=256), get_format("q5_k"), device)
        experts = random_experts(SMALL, get_format("int4"), device)
        x = torch.randn(2, SMALL.H).to(device, torch.bfloat16)
        routing = balanced_routing(2, SMALL)
        args = (routing.ids.to(device), routing.weights.to(device), experts)
        if what == "table":
            fused_moe.moe_ffn(x, *args[:2], experts.with_slots(args[0][0]))
        if what == "activations":
            fused_moe.moe_ffn(x, *args, activations="fp8")
        fused_moe.moe_ffn(x.float(), *args)


BIG = MoEShape(E=8, H=1536, I=768, topk=2)
KINDS = [*((name, "bf16") for name in FORMATS), ("fp8", "fp8")]


@functools.cache
def _model_sized(name: str, device: torch.device) -> fused_moe.Experts:
    return random_experts(BIG, get_format(name), device)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "activations"), KINDS)
def test_a_graph_replays_with_other_tokens_and_experts(name: str, activations: str) -> None:
    device = torch.device("cuda")
    experts, T = _model_sized(name, device), 16
    x = torch.randn(T, BIG.H, device=device).bfloat16()
    routing = balanced_routing(T, BIG)
    ids, weights = routing.ids.to(device), routing.weights.to(device)

    def run() -> torch.Tensor:
        return fused_moe.moe_ffn(x, ids, weights, experts, activations=activations)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed, route in ((1, skewed_routing), (2, one_expert_routing), (3, balanced_routing)):
        other = route(T, BIG, seed)
        x.copy_(torch.randn(T, BIG.H))
        ids.copy_(other.ids)
        weights.copy_(other.weights)
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, run())


SIZES = [
    *((*kind, rows) for kind in KINDS for rows in (4, 200)),
    *((*kind, rows) for kind in (KINDS[0], KINDS[-1]) for rows in (20, 80)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "activations", "rows"), SIZES)
def test_every_plan_of_the_table_at_sizes_of_a_model(
    name: str, activations: str, rows: int
) -> None:
    device = torch.device("cuda")
    T = rows * BIG.E // BIG.topk
    x = torch.randn(T, BIG.H).bfloat16()
    check(x, skewed_routing(T, BIG), _model_sized(name, device), device, activations)


def _meta_call(name: str, rows: int, activations: str = "bf16") -> tuple[str, object]:
    """(name, a launch for ``compiles.py``) of a small layer with DeepSeek-V3's sizes."""
    E, H, I, topk = 4, 7168, 2048, 2  # noqa: E741
    T, meta = rows * E // topk, torch.device("meta")

    def call() -> None:
        experts = fused_moe.Experts.empty(get_format(name), E, H, I, meta)
        x = torch.empty(T, H, dtype=torch.bfloat16, device=meta)
        ids = torch.empty(T, topk, dtype=torch.int64, device=meta)
        fused_moe.moe_ffn(
            x, ids, torch.empty(T, topk, device=meta), experts, activations=activations
        )

    return f"{name} {activations} {rows}", call


COMPILES = [
    _meta_call("bf16", 256),
    *(_meta_call(name, 64) for name in ("q4_k", "q6_k")),
    *(_meta_call(name, 1) for name in ("int4-g128", "q4_k", "q6_k", "fp8")),
    *(_meta_call("fp8", rows, "fp8") for rows in (64, 256)),
    *(_meta_call("int4-g128", rows) for rows in (64, 256)),
    _meta_call("int4", 256),
]
