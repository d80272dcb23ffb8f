"""Gated delta nets: against transformers' own functions, in the dtypes of a GPU."""

from __future__ import annotations

import pytest
import torch

from pykernels import ref
from pykernels.errors import PykernelsError
from pykernels.gpu.delta_net.causal_conv1d import causal_conv1d
from pykernels.gpu.delta_net.copy_states import StateCopies, save_states
from pykernels.gpu.delta_net.decode import DeltaNet, delta_step, norm_and_shift
from pykernels.gpu.delta_net.gate import delta_gates, gated_rms_norm, sigmoid_mul
from pykernels.gpu.delta_net.gated_delta_rule import DeltaRulePlan, gated_delta_rule
from pykernels.gpu.norm import rms_norm
from pykernels.shapes import StateBatch
from pykernels.testing import relative_error
from tests.delta_nets import (
    RAGGED,
    SLOTS,
    ConvStep,
    DeltaStep,
    batch_of,
    is_real_row,
    real,
    rows_of,
)
from tests.gpu.rounding import assert_rounded

SIZES = (1, 2, 32, 48)
FLOAT, BF16 = torch.float32, torch.bfloat16
FEW = ((130, 5, 0), (1, 2, 9), (0, 1, 4), (9, -1, 2), (64, 7, 3))


def bounds(dtype: torch.dtype, device: torch.device, chunked: bool) -> tuple[float, float]:
    """Largest and median relative error of a head's rows that are kept, or were multiplied, in a
    dtype: bfloat16 keeps 7 bits, which the interpreter cuts, and tf32 on a GPU 10."""
    if dtype == BF16:
        return (4e-2, 1e-2) if chunked else (2e-2, 5e-3)
    if chunked:  # sums of g are off by what 64 of them are rounded by
        return (2e-2, 1e-3) if device.type == "cuda" else (3e-5, 1e-6)
    return 3e-5, 5e-7


def assert_rows(actual: torch.Tensor, truth: torch.Tensor, bound: tuple[float, float]) -> None:
    pairs = zip(*(x.cpu().float().flatten(0, -2) for x in (actual, truth)), strict=True)
    errors = torch.tensor([relative_error(a, t) for a, t in pairs])
    assert errors.max() <= bound[0] and errors.median() <= bound[1], (errors.max(), errors.median())


def check(
    step: DeltaStep | ConvStep,
    out: torch.Tensor,
    state: torch.Tensor,
    bound: tuple[float, float],
    state_bound: tuple[float, float],
    **how: bool,
) -> None:
    """Results and states, which are float32, are transformers', and nothing else was written."""
    truth, states = step.expected(**how)
    here = is_real_row(step.batch, len(out))
    assert_rows(out[here], truth[here], bound)
    assert out[~here].isnan().all()
    used = step.batch.slots[real(step.batch)].long()
    assert_rows(state[used], states[used.cpu()], state_bound)
    rest = [i for i in range(len(state)) if i not in used]
    assert torch.equal(state[rest].nan_to_num(7), step.state[rest].nan_to_num(7))


@pytest.mark.parametrize("dtype", [FLOAT, BF16])
@pytest.mark.parametrize(
    ("chunked", "sizes"),
    [
        (False, SIZES),
        (True, SIZES),
        (True, (2, 4, 16, 32)),
        (True, (1, 2, 128, 16)),
        (True, (1, 2, 128, 128)),
    ],
)
def test_the_rule_is_transformers(
    chunked: bool, dtype: torch.dtype, sizes: tuple[int, ...], device: torch.device
) -> None:
    step = DeltaStep.random(FEW, *sizes, dtype, device)
    ours, out = step.fresh(), torch.full_like(step.v, torch.nan)
    plan = DeltaRulePlan(chunked, v_block=32)  # the second block is short
    assert gated_delta_rule(*ours.inputs, ours.batch, out=out, plan=plan) is out
    ours_of = [bounds(x, device, chunked) for x in (dtype, dtype if chunked else FLOAT)]
    check(step, out, ours.state, *ours_of)


@pytest.mark.parametrize("chunked", [False, True])
def test_value_heads_may_go_over_key_heads_in_turns(chunked: bool, device: torch.device) -> None:
    step = DeltaStep.random(((3, 5, 2), (1, 2, 0)), 2, 4, 32, 32, device=device)
    ours, out = step.fresh(), torch.full_like(step.v, torch.nan)
    plan = DeltaRulePlan(chunked)
    gated_delta_rule(*ours.inputs, ours.batch, out=out, plan=plan, tiled=True)
    bound = bounds(FLOAT, device, chunked)
    check(step, out, ours.state, bound, bound, tiled=True)


def test_a_sequence_goes_on_from_its_state(device: torch.device) -> None:
    """Behind a prompt in chunks a shorter one, then a decode step."""
    whole = DeltaStep.random([(90, 4, 0)], *SIZES, device=device)
    truth, states = whole.expected()
    pieces, first = whole.fresh(), int(whole.batch.starts[0])
    for begin, end in ((0, 70), (70, 89), (89, 90)):
        vectors = ([first + begin], [end - begin], [4], [begin])
        batch = StateBatch(
            *(torch.tensor(x, dtype=torch.int32, device=device) for x in vectors), end - begin
        )
        rows = slice(first + begin, first + end)
        out = gated_delta_rule(*pieces.inputs, batch)
        assert_rows(out[rows], truth[rows], bounds(FLOAT, device, True))
    assert_rows(pieces.state[4], states[4], bounds(FLOAT, device, True))


def test_keys_that_are_all_alike(device: torch.device) -> None:
    """The triangle's powers grow to 1e18 then; its inverse has nothing above 1."""
    step = DeltaStep.random([(64, 0, 0)], *SIZES, device=device)
    rows = rows_of(step.batch, 0)
    step.k[rows] = step.k[rows.start]
    step.beta[rows], step.g[rows] = 1.0, 0.0
    ours = step.fresh()
    out = gated_delta_rule(*ours.inputs, ours.batch)
    truth, _ = step.expected()
    bound = (2e-2, 2e-3) if device.type == "cuda" else (1e-4, 1e-5)
    assert_rows(out[rows], truth[rows], bound)


@pytest.mark.parametrize("dtype", [FLOAT, BF16])
@pytest.mark.parametrize(("C", "K"), [(160, 4), (48, 3)])
def test_the_convolution_is_transformers(
    C: int, K: int, dtype: torch.dtype, device: torch.device
) -> None:
    step = ConvStep.random(RAGGED, C, K, dtype, device)
    ours, out = step.fresh(), torch.full_like(step.x, torch.nan)
    assert causal_conv1d(ours.x, ours.weight, ours.state, ours.batch, out=out) is out
    check(step, out, ours.state, bounds(dtype, device, False), (0.0, 0.0))


@pytest.mark.parametrize("dtype", [FLOAT, BF16])
@pytest.mark.parametrize("longest", [1, 130])
def test_a_short_convolution(longest: int, dtype: torch.dtype, device: torch.device) -> None:
    """Of LFM2: its inputs lie in a row with the gates before and behind it."""
    sequences = [each for each in RAGGED if each[0] <= longest]
    step = ConvStep.random(sequences, 48, 3, dtype, device)
    ours, rows = step.fresh(), torch.randn(len(step.x), 3 * 48, device=device).to(dtype)
    before, behind, x = rows.chunk(3, -1)
    x.copy_(step.x)
    how = {"silu": False, "bias": torch.randn(48, device=device), "gates": (before, behind)}
    state = step.state.cpu().clone()
    truth = ref.causal_conv1d(
        x.cpu(),
        step.weight.cpu(),
        state,
        batch_of(sequences)[0],
        silu=False,
        bias=how["bias"].cpu(),
        gates=(before.cpu(), behind.cpu()),
        dtype=torch.float64,
    )
    out = torch.full_like(step.x, torch.nan)
    causal_conv1d(x, ours.weight, ours.state, ours.batch, **how, out=out)
    here = is_real_row(batch_of(sequences)[0], len(out))
    assert_rows(out[here], truth[here].float(), bounds(dtype, device, False))
    assert out[~here].isnan().all()
    assert torch.equal(ours.state.cpu().nan_to_num(7), state.nan_to_num(7))


def test_a_decode_step_of_the_convolution(device: torch.device) -> None:
    step = ConvStep.random([(1, 3, 2), (1, 1, 0), (1, -1, 5)], 160, device=device)
    ours, out = step.fresh(), torch.full_like(step.x, torch.nan)
    causal_conv1d(ours.x, ours.weight, ours.state, ours.batch, out=out)
    check(step, out, ours.state, bounds(FLOAT, device, False), (0.0, 0.0))


@pytest.mark.parametrize("dtype", [FLOAT, BF16])
def test_gates(dtype: torch.dtype, device: torch.device) -> None:
    """Queries and their gates lie in turns in one row of Qwen3-Next's attention."""
    rows = torch.randn(3, 5, 2 * 48, device=device).to(dtype) * 4
    x, gate = rows.chunk(2, -1)
    weight = torch.randn(48, device=device)
    assert_rounded(
        gated_rms_norm(x, gate, weight, 1e-5),
        ref.gated_rms_norm(x, gate, weight, 1e-5, torch.float64),
    )
    for opened in (gate, gate[..., :1]):
        assert_rounded(sigmoid_mul(x, opened), ref.sigmoid_mul(x, opened, torch.float64))
    a, b = (20 * torch.randn(7, 6, device=device).to(dtype) for _ in "ab")
    a_log, dt_bias = torch.randn(6, device=device), torch.randn(6, device=device)
    truth = ref.delta_gates(a, b, a_log, dt_bias, torch.float64)
    for found, wanted in zip(delta_gates(a, b, a_log, dt_bias), truth, strict=True):
        assert found.dtype == FLOAT
        torch.testing.assert_close(found.double(), wanted, rtol=3e-6, atol=1e-12)


def test_zero_centred_norms_are_norms_of_weight_plus_one(device: torch.device) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

    x, norm = torch.randn(3, 48, device=device), Qwen3NextRMSNorm(48, eps=1e-5).to(device)
    norm.weight.data = torch.randn(48, device=device)
    found, _ = rms_norm(x, norm.weight.detach() + 1, 1e-5)
    assert_rounded(found, norm(x).detach().double())


@pytest.mark.parametrize("dtype", [FLOAT, BF16])
@pytest.mark.parametrize("tiled", [False, True])
def test_a_decode_step_in_two_launches(
    tiled: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Of sequences that go on, that begin, and of none, beside the float64 of ``ref``'s ops."""
    HK, HV, DK, DV, K = 2, 4, 20, 48, 4
    sequences = ((1, 3, 2), (1, 1, 0), (0, 2, 3), (1, -1, 5), (1, 0, 9))
    conv = ConvStep.random(sequences, 2 * HK * DK + HV * DV, K, dtype, device)
    rows, (T, C) = conv.x.new_zeros(len(conv.x), 700), conv.x.shape
    x, z, b, a = rows.split([C, HV * DV, HV, 700 - C - HV * DV - HV], 1)
    r = torch.Generator().manual_seed(2)
    rows.copy_(torch.randn(T, 700, generator=r))
    x.copy_(conv.x)
    a = a[:, :HV]
    state = torch.randn(SLOTS, HV, DK, DV, generator=r).to(device)
    a_log, dt_bias, weight = (torch.randn(n, generator=r).to(device) for n in (HV, HV, DV))
    batch = batch_of(sequences)[0]
    wide = [each.cpu().double() for each in (x, conv.weight, conv.state, state)]
    how = {"dtype": torch.float64}
    truth = ref.causal_conv1d(wide[0], wide[1], wide[2], batch, **how)
    q, k, v = truth.split([HK * DK, HK * DK, HV * DV], 1)
    heads = q.view(T, HK, DK), k.view(T, HK, DK), v.view(T, HV, DV)
    gates = ref.delta_gates(a.cpu(), b.cpu(), a_log.cpu(), dt_bias.cpu(), torch.float64)
    truth = ref.gated_delta_rule(*heads, *gates, wide[3], batch, tiled=tiled, **how)
    net = DeltaNet(conv.weight, conv.state.clone(), state.clone(), a_log, dt_bias, HK, tiled)
    found = delta_step(x, a, b, net, conv.batch, x.new_full((T, HV, DV), torch.nan))
    here = is_real_row(conv.batch, T)
    assert_rows(found[here], truth[here].float(), bounds(dtype, device, False))
    assert found[~here].isnan().all() and torch.equal(net.conv_state.isnan(), conv.state.isnan())
    gate = z.view(T, HV, DV)
    normed = norm_and_shift(found, gate, weight, 1e-5, x, net.conv_state, conv.batch)
    wanted = ref.gated_rms_norm(found.cpu(), gate.cpu(), weight.cpu(), 1e-5, torch.float64)
    assert_rounded(normed[here].cpu(), wanted[here])
    assert torch.equal(net.conv_state.cpu().nan_to_num(7), wide[2].float().nan_to_num(7))
    used = conv.batch.slots[real(conv.batch)].long().cpu()
    assert_rows(net.state.cpu()[used], wide[3][used].float(), bounds(dtype, device, False))
    rest = [i for i in range(SLOTS) if i not in used]
    assert torch.equal(net.state[rest], state[rest])


def test_states_of_all_layers_are_copied_in_one_launch(device: torch.device) -> None:
    states = [torch.randn(4, *shape, device=device) for shape in ((3, 1700), (2, 8, 16), (1,))]
    wanted = [state.clone() for state in states]
    copies = StateCopies(states)
    for source, target in ((1, 3), (3, 0), (2, 2)):
        copies.copy(source, target)
        for state in wanted:
            state[target] = state[source]
    for state, other in zip(states, wanted, strict=True):
        assert torch.equal(state, other)


def test_states_are_saved_in_a_step(device: torch.device) -> None:
    """Of sequences that have a slot, to those that are named."""
    state = torch.randn(6, 3, 1700, device=device)
    wanted = state.clone()
    wanted[4], wanted[2] = state[1], state[0]
    slots, saved = torch.tensor([[1, 3, -1, 0], [4, -1, 5, 2]], device=device).int()
    save_states(state, slots, saved)
    assert torch.equal(state, wanted)
    with pytest.raises(PykernelsError):
        save_states(state.half(), slots, saved)
    with pytest.raises(PykernelsError):
        save_states(state, slots, saved[:2])


def _meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _meta_batch(S: int, longest: int) -> StateBatch:
    return StateBatch(*(_meta(S, dtype=torch.int32) for _ in range(4)), longest)


def _save(S: int) -> None:
    slots = _meta(S, dtype=torch.int32)
    save_states(_meta(9, 32, 128, 128, dtype=FLOAT), slots, slots)


def _rule(T: int, S: int, longest: int) -> None:
    q, k, v = (_meta(T, heads, 128) for heads in (16, 16, 32))
    gates, state = _meta(T, 32, dtype=FLOAT), _meta(9, 32, 128, 128, dtype=FLOAT)
    gated_delta_rule(q, k, v, gates, gates, state, _meta_batch(S, longest))


def _conv(T: int, S: int, longest: int) -> None:
    state = _meta(9, 3, 8192, dtype=FLOAT)
    causal_conv1d(_meta(T, 8192), _meta(8192, 4), state, _meta_batch(S, longest))


def _step(S: int) -> None:
    gates, batch = (_meta(S, 32), _meta(S, 32)), _meta_batch(S, 1)
    states = _meta(9, 3, 8192, dtype=FLOAT), _meta(9, 32, 128, 128, dtype=FLOAT)
    net = DeltaNet(_meta(8192, 4), *states, _meta(32), _meta(32), 16)
    out = delta_step(_meta(S, 8192), *gates, net, batch)
    norm_and_shift(out, _meta(*out.shape), _meta(128), 1e-6, _meta(S, 8192), states[0], batch)


HEADS = (64, 32, 128)
COMPILES = [
    ("gated_delta_rule decode", lambda: _rule(8, 8, 1)),
    ("gated_delta_rule prompt", lambda: _rule(4096, 2, 4000)),
    ("causal_conv1d decode", lambda: _conv(8, 8, 1)),
    ("delta_step", lambda: _step(8)),
    ("copy_states", lambda: StateCopies([_meta(9, 32, 128, 128, dtype=FLOAT)]).copy(1, 2)),
    ("save_states", lambda: _save(2)),
    ("causal_conv1d prompt", lambda: _conv(4096, 2, 4000)),
    ("gated_rms_norm", lambda: gated_rms_norm(_meta(*HEADS), _meta(*HEADS), _meta(128), 1e-6)),
    ("sigmoid_mul", lambda: sigmoid_mul(_meta(64, 16, 256), _meta(64, 16, 256))),
    ("sigmoid_mul one", lambda: sigmoid_mul(_meta(64, 1, 2048), _meta(64, 1, 1))),
    ("delta_gates", lambda: delta_gates(*(_meta(64, 32) for _ in "ab"), _meta(32), _meta(32))),
]
