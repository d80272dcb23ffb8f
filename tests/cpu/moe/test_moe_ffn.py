"""The fused expert kernels against the reference, on every backend and format of this machine.

Two bounds. Against the float64 truth of what the kernel is specified to compute (bf16 inputs, ``h``
rounded to bf16, the rest exact) the error is that of float32 sums. Against the unrounded truth it
is no more than that of torch's own bf16 modules.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from pykernels import cpu, ref
from pykernels.cpu.moe.kernel import NO_GEMM
from pykernels.cpu.moe.plan import MoEPlan
from pykernels.cpu.weights.layout import INTEGERS
from pykernels.quant import PackedExperts, get_format
from pykernels.registry import get_backend
from pykernels.shapes import MoEShape, Routing
from pykernels.testing import (
    assert_close,
    balanced_routing,
    fit,
    flips,
    one_expert_routing,
    poisoned,
    random_experts,
    relative_error,
    skewed_routing,
)

from ..kernels import DIFFERENT, variants

FLOAT32_SUMS = 1e-6

VARIANTS = variants("bf16", "int8")
FEWER, EXACT = variants("bf16", "int8", names=DIFFERENT), variants("bf16", names=DIFFERENT)

SHAPE = MoEShape(E=8, H=256, I=128, topk=3)
RAGGED = MoEShape(E=5, H=200, I=72, topk=2)
TINY, WIDE = MoEShape(E=2, H=32, I=32, topk=1), MoEShape(E=3, H=640, I=384, topk=3)

CASES = [
    pytest.param(SHAPE, balanced_routing(1, SHAPE), id="one token: the decode step"),
    pytest.param(SHAPE, balanced_routing(2, SHAPE), id="two tokens: some experts shared"),
    pytest.param(SHAPE, one_expert_routing(3, SHAPE), id="3 a expert: padded to a tile of 4"),
    pytest.param(SHAPE, one_expert_routing(7, SHAPE), id="7 a expert: padded to 8"),
    pytest.param(SHAPE, one_expert_routing(8, SHAPE), id="8 a expert: one full group"),
    pytest.param(SHAPE, one_expert_routing(9, SHAPE), id="9 a expert: a group and one over"),
    pytest.param(SHAPE, balanced_routing(64, SHAPE), id="many tokens, ragged groups"),
    pytest.param(SHAPE, skewed_routing(40, SHAPE), id="skewed: crowded and empty experts"),
    pytest.param(SHAPE, one_expert_routing(20, SHAPE, 6), id="wraps around; experts with none"),
    pytest.param(RAGGED, balanced_routing(5, RAGGED), id="H and I off every block size"),
    pytest.param(TINY, balanced_routing(3, TINY), id="one block, K padded fourfold"),
    pytest.param(WIDE, balanced_routing(4, WIDE), id="every expert taken, several scale blocks"),
]


def _x(T: int, H: int) -> torch.Tensor:
    return torch.randn(T, H, generator=torch.Generator().manual_seed(T)).to(torch.bfloat16)


@functools.cache
def _experts(shape: MoEShape, fmt: str) -> PackedExperts:
    return random_experts(shape, get_format(fmt))


@functools.cache
def _truth(fmt: str, activations: str, case: int) -> tuple[torch.Tensor, float]:
    """The reference's result, the same for every backend, and the error allowed."""
    shape, routing = CASES[case].values
    shape = fit(shape, get_format(fmt))
    reference = functools.partial(
        ref.moe_ffn,
        _x(routing.T, shape.H),
        routing.ids,
        routing.weights,
        _experts(shape, fmt),
        dtype=torch.float64,
        h_dtype=torch.bfloat16,
        activations=activations,
    )
    truth = reference()
    return truth, FLOAT32_SUMS + flips(reference, truth)


@pytest.mark.parametrize(("kernel", "fmt", "activations"), VARIANTS)
@pytest.mark.parametrize("case", range(len(CASES)), ids=[case.id for case in CASES])
def test_matches_the_reference(kernel, fmt, activations, case):
    shape, routing = CASES[case].values
    shape = fit(shape, get_format(fmt))
    experts, x = _experts(shape, fmt), _x(routing.T, shape.H)
    truth, bound = _truth(fmt, activations, case)
    y = cpu.moe_ffn(
        x.float(), routing.ids, routing.weights, experts, kernel=kernel, activations=activations
    )
    assert_close(y, truth, bound)


@pytest.mark.parametrize(("kernel", "fmt", "_"), EXACT)
def test_no_worse_than_native_bf16(kernel, fmt, _):
    shape = fit(SHAPE, get_format(fmt))
    experts, routing = _experts(shape, fmt), balanced_routing(33, shape)
    x = _x(33, shape.H)
    truth = ref.moe_ffn(x, routing.ids, routing.weights, experts, dtype=torch.float64)
    native = torch.zeros_like(x)
    for e in range(shape.E):
        gate, up, down = (experts.fmt.dequantize(w).bfloat16() for w in experts.unpack(e))
        tokens, ranks = torch.where(routing.ids == e)
        h = F.silu(F.linear(x[tokens], gate)) * F.linear(x[tokens], up)
        y = F.linear(h, down) * routing.weights[tokens, ranks, None]
        native.index_add_(0, tokens, y.to(native.dtype))
    y = cpu.moe_ffn(x, routing.ids, routing.weights, experts, kernel=kernel)
    assert y.dtype == torch.bfloat16
    assert relative_error(y, truth) <= relative_error(native, truth)


@pytest.mark.parametrize(("kernel", "fmt", "activations"), FEWER)
def test_zero_tokens(kernel, fmt, activations):
    shape = fit(SHAPE, get_format(fmt))
    experts = _experts(shape, fmt)
    y = cpu.moe_ffn(
        torch.empty(0, shape.H),
        torch.empty(0, 3, dtype=torch.int64),
        torch.empty(0, 3),
        experts,
        kernel=kernel,
        activations=activations,
    )
    assert y.shape == (0, shape.H)


def test_tokens_that_take_no_expert_are_zeros():
    experts, none = _experts(SHAPE, "bf16"), torch.empty(2, 0)
    call = cpu.MoECall(experts, cpu.make_kernel("generic", "bf16"), cpu.MoEWorkspace())
    y = cpu.run_serially(call, _x(2, SHAPE.H), none.long(), none, poisoned(2, SHAPE.H))
    assert torch.equal(y, torch.zeros(2, SHAPE.H))


@pytest.mark.parametrize(("kernel", "fmt", "activations"), FEWER)
def test_a_token_does_not_depend_on_batch_or_plan(kernel, fmt, activations):
    """On one path, tiles or GEMM: which one an expert takes is a matter of its token count.

    So it is whether bf16 products are in AMX tiles, which those of three tokens are.
    """
    shape = fit(SHAPE, get_format(fmt))
    experts, routing = _experts(shape, fmt), balanced_routing(11, shape)
    x = _x(11, shape.H).float()
    for gemm_from in (1, NO_GEMM) if get_backend(kernel).gemm_from else (NO_GEMM,):

        def run(
            rows: slice | list[int],
            i_chunk: int,
            h_chunk: int,
            share: int = 0,
            gemm_from: int = gemm_from,
        ) -> torch.Tensor:
            cut = MoEPlan(i_chunk, h_chunk, gemm_from, h_share=share)
            ids, weights = routing.ids[rows], routing.weights[rows]
            return cpu.moe_ffn(
                x[rows], ids, weights, experts, kernel=kernel, activations=activations, moe_plan=cut
            )

        whole = run(slice(None), 2, 2)
        alone = 3 if kernel == "amx" and activations == "bf16" and fmt not in INTEGERS else 1
        for t in range(11):
            assert torch.equal(run([t] * alone, 2, 2), whole[[t] * alone]), f"token {t}"
        for chunks in ((1, 1), (3, 5), (99, 99), (99, 99, 2)):
            assert torch.equal(run(slice(None), *chunks), whole), chunks


@pytest.mark.parametrize(("kernel", "fmt", "activations"), FEWER)
def test_outputs_are_written_and_nothing_else(kernel, fmt, activations):
    shape = fit(RAGGED, get_format(fmt))
    experts, routing = _experts(shape, fmt), balanced_routing(5, shape)
    stages = cpu.make_kernel(kernel, fmt, activations)
    call = cpu.MoECall(experts, stages, cpu.MoEWorkspace())
    around = poisoned(7, shape.H + 16)
    y = around[1:6, 8:-8]
    cpu.run_serially(call, _x(5, shape.H), routing.ids, routing.weights, y)
    assert y.isfinite().all()
    assert around.isnan().sum() == around.numel() - y.numel()


@pytest.mark.parametrize("shape", [SHAPE, RAGGED], ids=["whole blocks", "H off a block"])
def test_results_in_bf16_are_those_in_float32_rounded(shape):
    experts, routing, x = _experts(shape, "bf16"), balanced_routing(5, shape), _x(5, shape.H)
    y = cpu.moe_ffn(x.float(), routing.ids, routing.weights, experts, kernel="generic")
    assert y.dtype == torch.float32
    halves = cpu.moe_ffn(x, routing.ids, routing.weights, experts, kernel="generic")
    assert torch.equal(halves, y.bfloat16())


@pytest.mark.parametrize(("kernel", "fmt", "activations"), FEWER)
def test_stale_scratch_is_not_read(kernel, fmt, activations):
    """A call after one of a wider layer and NaN inputs, same buffers, finds its own values."""
    stages, workspace = cpu.make_kernel(kernel, fmt, activations), cpu.MoEWorkspace()
    wide, ragged = (fit(s, get_format(fmt)) for s in (MoEShape(E=5, H=384, I=384, topk=2), RAGGED))

    def run(shape: MoEShape, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        call = cpu.MoECall(experts[shape], stages, workspace)
        return cpu.run_serially(call, x, routing.ids, routing.weights, poisoned(*x.shape))

    experts = {shape: random_experts(shape, get_format(fmt)) for shape in (wide, ragged)}
    nans = poisoned(12, wide.H, dtype=torch.bfloat16)
    assert run(wide, nans, balanced_routing(12, wide)).isnan().all()
    routing, x = balanced_routing(2, ragged, seed=1), _x(2, ragged.H)
    truth = ref.moe_ffn(x, routing.ids, routing.weights, experts[ragged], dtype=torch.float64)
    assert_close(run(ragged, x, routing), truth, 0.02)


@pytest.mark.parametrize(("kernel", "fmt", "activations"), FEWER)
def test_a_nan_reaches_its_own_token_only(kernel, fmt, activations):
    shape = fit(SHAPE, get_format(fmt))
    experts, routing, x = _experts(shape, fmt), one_expert_routing(6, shape), _x(6, shape.H)
    x[4, 17] = float("nan")
    y = cpu.moe_ffn(
        x, routing.ids, routing.weights, experts, kernel=kernel, activations=activations
    )
    assert y[4].isnan().all() and y[[0, 1, 2, 3, 5]].isfinite().all()


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7F800001], ids=hex)
def test_a_nan_of_any_bits_is_one_in_bf16(bits):
    """Rounded as a number it would be a zero, or an infinity."""
    experts, routing = _experts(SHAPE, "bf16"), balanced_routing(2, SHAPE)
    x = _x(2, SHAPE.H).float()
    x.view(torch.int32)[1, 3] = bits
    y = cpu.moe_ffn(x, routing.ids, routing.weights, experts, kernel="generic")
    assert y[1].isnan().all() and y[0].isfinite().all()
