"""The ops of gated delta nets and of short convolutions by a call, against transformers' own, and
the reference too."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, Lfm2MoeConfig, Qwen3NextConfig
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeShortConv
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextGatedDeltaNet,
    Qwen3NextRMSNorm,
    Qwen3NextRMSNormGated,
)

from pykernels import cpu, ref
from pykernels.cpu.delta_net.args import DeltaRulePlan, plan
from pykernels.cpu.ops import delta_net
from pykernels.errors import PykernelsError
from pykernels.shapes import StateBatch
from pykernels.testing import relative_error
from tests.delta_nets import RAGGED, ConvStep, DeltaStep, is_real_row, real

SIZES = (2, 4, 32, 64)
BOUND, MEDIAN = 1e-5, 5e-7  # transformers in float32 is off by about as much, in rows that cancel


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def assert_rows(actual: torch.Tensor, truth: torch.Tensor) -> None:
    """Relative errors of rows: the largest and the median one."""
    errors = torch.tensor(
        [
            relative_error(a, t)
            for a, t in zip(*(x.flatten(0, -2) for x in (actual, truth)), strict=True)
        ]
    )
    assert errors.max() <= BOUND and errors.median() <= MEDIAN, (errors.max(), errors.median())


def check(step: DeltaStep | ConvStep, out: torch.Tensor, state: torch.Tensor, **how: bool) -> None:
    """Results and states are transformers', and nothing else was written."""
    truth, states = step.expected(**how)
    here = is_real_row(step.batch, len(out))
    assert_rows(out[here], truth[here])
    assert not out[~here].any()
    used = step.batch.slots[real(step.batch)].long()
    assert_rows(state[used], states[used])
    rest = [i for i in range(len(state)) if i not in used]
    assert torch.equal(state[rest].nan_to_num(7), step.state[rest].nan_to_num(7))


@pytest.mark.parametrize("N", [8, 16])
def test_the_rule_is_transformers(N: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_net, "width", lambda target: N)
    step = DeltaStep.random(RAGGED, *SIZES)
    ours = step.fresh()
    check(step, cpu.gated_delta_rule(*ours.inputs, ours.batch), ours.state)


def test_the_reference_is_transformers() -> None:
    step = DeltaStep.random(RAGGED, *SIZES)
    ours = step.fresh()
    out = ref.gated_delta_rule(*ours.inputs, ours.batch, dtype=torch.float64)
    check(step, out, ours.state)
    check(step, out, ours.state, recurrent=True)


@pytest.mark.parametrize("backend", [cpu, ref])
def test_value_heads_may_go_over_key_heads_in_turns(backend: Any) -> None:
    step = DeltaStep.random(RAGGED, *SIZES)
    ours = step.fresh()
    out = backend.gated_delta_rule(*ours.inputs, ours.batch, tiled=True)
    check(step, out, ours.state, tiled=True)


def test_a_sequence_goes_on_from_its_state() -> None:
    """In pieces, the last ones a decode step each, what it gives at once."""
    whole = DeltaStep.random([(77, 4, 0)], *SIZES)
    truth, states = whole.expected()
    pieces, first = whole.fresh(), int(whole.batch.starts[0])
    for begin, end in ((0, 64), (64, 75), (75, 76), (76, 77)):
        at = torch.tensor([first + begin], dtype=torch.int32)
        slot, past = torch.tensor([4], dtype=torch.int32), torch.tensor([begin], dtype=torch.int32)
        batch = StateBatch(at, torch.full_like(at, end - begin), slot, past, end - begin)
        out = cpu.gated_delta_rule(*pieces.inputs, batch)
        rows = slice(first + begin, first + end)
        assert_rows(out[rows], truth[rows])
    assert_rows(pieces.state[4], states[4])


def test_every_cut_into_tasks_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_net, "width", lambda target: 8)  # of strips of 32
    step, found = DeltaStep.random(RAGGED, *SIZES), []
    used = step.batch.slots[real(step.batch)].long()
    for columns in (64, 32):
        ours = step.fresh()
        out = cpu.gated_delta_rule(*ours.inputs, ours.batch, plan=DeltaRulePlan(columns))
        found.append((out, ours.state[used]))
    for out, state in found[1:]:
        assert torch.equal(out, found[0][0]) and torch.equal(state, found[0][1])


def test_heads_are_cut_where_threads_outnumber_them() -> None:
    assert plan(S=1, HV=32, DV=128, strip=32, threads=2).columns == 128
    assert plan(S=1, HV=32, DV=128, strip=32, threads=16).columns == 64
    assert plan(S=1, HV=4, DV=128, strip=32, threads=16).columns == 32


@pytest.mark.parametrize(("K", "silu"), [(4, True), (3, False)])
def test_the_convolution_is_transformers(K: int, silu: bool) -> None:
    """With LFM2's three tokens and no SiLU too; 272 channels are a task and a short one."""
    step = ConvStep.random(RAGGED, 272, K)
    for op in (cpu.causal_conv1d, ref.causal_conv1d):
        ours = step.fresh()
        out = op(ours.x, ours.weight, ours.state, ours.batch, silu=silu)
        check(step, out, ours.state, silu=silu)


@pytest.mark.parametrize("ops", [cpu, ref], ids=["cpu", "ref"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_a_short_convolution_is_transformers(ops: Any, bias: bool) -> None:
    """Of LFM2's layers: prompts shorter and longer than it, and steps behind them."""
    H = 272
    sizes: Any = {"hidden_size": H, "num_hidden_layers": 1, "layer_types": ["conv"]}
    config = Lfm2MoeConfig(**sizes, conv_bias=bias)
    layer, past = Lfm2MoeShortConv(config, 0).eval(), DynamicCache(config=config)
    state, x = torch.full((3, 2, H), torch.nan), torch.randn(9, H)
    for begin, end in ((0, 1), (1, 2), (2, 8), (8, 9)):
        with torch.no_grad():
            truth = layer(x[None, begin:end], past_key_values=past)[0]
            before, behind, rows = layer.in_proj(x[begin:end]).chunk(3, -1)
        vectors = ([0], [end - begin], [1], [begin])
        batch = StateBatch(*(torch.tensor(y, dtype=torch.int32) for y in vectors), end - begin)
        weights = {"weight": layer.conv.weight[:, 0].detach(), "bias": layer.conv.bias}
        gates = before, behind
        out = ops.causal_conv1d(rows, state=state, batch=batch, silu=False, gates=gates, **weights)
        with torch.no_grad():
            assert_rows(layer.out_proj(out), truth)
    assert state[[0, 2]].isnan().all()


def test_gates_are_transformers() -> None:
    T, heads, D = 3, 17, 48
    x, gate, weight = torch.randn(T, heads, D), 30 * torch.randn(T, heads, D), torch.randn(D)
    norm = Qwen3NextRMSNormGated(D, eps=1e-5)
    norm.weight.data = weight
    for ops in (cpu, ref):
        assert_rows(ops.gated_rms_norm(x, gate, weight, 1e-5), norm(x, gate).detach())
        assert_rows(ops.sigmoid_mul(x, gate), x * torch.sigmoid(gate))
        assert_rows(ops.sigmoid_mul(x, gate[..., :1]), x * torch.sigmoid(gate[..., :1]))


def test_zero_centred_norms_are_norms_of_weight_plus_one() -> None:
    x, norm = torch.randn(3, 48), Qwen3NextRMSNorm(48, eps=1e-5)
    norm.weight.data = torch.randn(48).bfloat16().float()
    truth = norm(x).detach()
    weight = norm.weight.detach() + 1
    assert_rows(ref.rms_norm(x, weight, 1e-5)[0], truth)
    found, _ = cpu.rms_norm(x, weight, 1e-5)
    assert bool(((found.double() - truth).abs() <= truth.abs() * 2**-8).all())  # of bfloat16


@pytest.mark.parametrize("ops", [cpu, ref], ids=["cpu", "ref"])
def test_a_layer_is_transformers(ops: Any) -> None:
    """A prompt and a step behind it, by the ops one after the other."""
    HK, HV, DK, DV = SIZES
    config = Qwen3NextConfig(
        hidden_size=64,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=HK,
        linear_num_value_heads=HV,
        linear_key_head_dim=DK,
        linear_value_head_dim=DV,
    )
    layer, past = Qwen3NextGatedDeltaNet(config, 0).eval(), DynamicCache(config=config)
    conv = torch.full((2, 3, 2 * HK * DK + HV * DV), torch.nan)
    state, x = torch.full((2, HV, DK, DV), torch.nan), torch.randn(71, 64)
    for begin, end in ((0, 70), (70, 71)):
        rows = x[begin:end]
        with torch.no_grad():
            truth = layer(rows[None], cache_params=past)[0]
            qkvz, ba = layer.in_proj_qkvz(rows), layer.in_proj_ba(rows)
            q, k, v, z, b, a = (
                y[0] for y in layer.fix_query_key_value_ordering(qkvz[None], ba[None])
            )
        vectors = ([0], [end - begin], [1], [begin])
        batch = StateBatch(*(torch.tensor(y, dtype=torch.int32) for y in vectors), end - begin)
        mixed = torch.cat([y.flatten(1) for y in (q, k, v)], -1)
        mixed = ops.causal_conv1d(mixed, layer.conv1d.weight[:, 0], conv, batch)
        q, k, v = mixed.split((HK * DK, HK * DK, HV * DV), -1)
        g, beta = ops.delta_gates(a, b, layer.A_log, layer.dt_bias)
        heads = (q.unflatten(1, (HK, DK)), k.unflatten(1, (HK, DK)), v.unflatten(1, (HV, DV)))
        out = ops.gated_delta_rule(*heads, g, beta, state, batch)
        out = ops.gated_rms_norm(out, z, layer.norm.weight, config.rms_norm_eps)
        with torch.no_grad():
            assert_rows(layer.out_proj(out.flatten(1)), truth)


STEP = DeltaStep.random([(3, 1, 0)], 1, 1, 16, 16)


def rule(**changed: Any) -> torch.Tensor:
    return cpu.gated_delta_rule(**{**vars(STEP), **changed})


def moved(**changed: int) -> StateBatch:
    vectors = {name: torch.tensor([x], dtype=torch.int32) for name, x in changed.items()}
    return replace(STEP.batch, **vectors)


REFUSED = {
    "with DK = 24. Head": lambda: rule(
        q=torch.ones(4, 1, 24), k=torch.ones(4, 1, 24), state=torch.ones(9, 1, 24, 16)
    ),
    "state is torch.bfloat16": lambda: rule(state=STEP.state.bfloat16()),
    "state is torch.float32 [9, 1, 16, 32]": lambda: rule(state=torch.ones(9, 1, 16, 32)),
    "the state has gaps": lambda: rule(state=torch.ones(9, 1, 16, 32)[..., ::2]),
    "2 value heads on 3 key heads": lambda: rule(
        q=torch.ones(4, 3, 16), k=torch.ones(4, 3, 16), v=torch.ones(4, 2, 16)
    ),
    "slot 9 of 9": lambda: rule(batch=moved(slots=9)),
    "rows from 2 to 5 of 4": lambda: rule(batch=moved(starts=2)),
    "tasks of 3 columns": lambda: rule(plan=DeltaRulePlan(3)),
    "two sequences have one slot": lambda: rule(
        batch=StateBatch.decode(*torch.ones(2, 2, dtype=torch.int32))
    ),
    "a convolution of 24 channels over 4": lambda: cpu.causal_conv1d(
        torch.ones(4, 24), torch.ones(24, 4), torch.ones(9, 3, 24), STEP.batch
    ),
    "state is torch.float32 [9, 16, 3]. Give float32 of shape [slots, 3, 16]": (
        lambda: cpu.causal_conv1d(
            torch.ones(4, 16), torch.ones(16, 4), torch.ones(9, 16, 3), STEP.batch
        )
    ),
    "heads of 24 numbers": lambda: cpu.sigmoid_mul(torch.ones(1, 2, 24), torch.ones(1, 2, 24)),
    "gate is torch.float32 [1, 2, 2]": lambda: cpu.sigmoid_mul(
        torch.ones(1, 2, 16), torch.ones(1, 2, 2)
    ),
    "must be contiguous int32 [1]": lambda: moved(slots=1, past=1).decode(
        torch.ones(1), torch.ones(1)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused(message: str) -> None:
    with pytest.raises(PykernelsError, match=re.escape(message)):
        REFUSED[message]()
