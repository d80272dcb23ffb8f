"""``supports(...)`` of every op: None, or one clear line for a dtype, a shape or a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton

from pykernels.errors import PykernelsError
from pykernels.gpu import embedding, norm, sampling
from pykernels.gpu.attention import mla_read
from pykernels.gpu.common import launch
from pykernels.gpu.delta_net import causal_conv1d, gate, gated_delta_rule
from pykernels.gpu.gemm import linear
from pykernels.gpu.gemm import weights as gemm_weights
from pykernels.gpu.moe import fused_moe, permute, router, router_logits
from pykernels.gpu.plans.gemm import SkinnyExpertsPlan
from pykernels.gpu.quantize import quantize_fp8
from pykernels.quant import get_format
from pykernels.shapes import ExpertSpec, MoEShape, RouterSpec, Routing, StateBatch

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
LAYER = MoEShape(E=4, H=256, I=256, topk=2)


def _zeros(d: torch.device, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, device=d, dtype=dtype)


def _decode(d: torch.device) -> StateBatch:
    return StateBatch.decode(*torch.ones(2, 2, dtype=torch.int32, device=d))


def _rule(d: torch.device, D: int, state: torch.dtype) -> list[torch.Tensor]:
    heads = [_zeros(d, 2, n, D) for n in (1, 1, 2)]
    gates = [_zeros(d, 2, 2, dtype=FLOAT) for _ in "gb"]
    return [*heads, *gates, _zeros(d, 3, 2, D, D, dtype=state)]


def _conv(d: torch.device, K: int) -> list[torch.Tensor]:
    return [_zeros(d, 2, 8), _zeros(d, 8, K), _zeros(d, 3, K - 1, 8, dtype=FLOAT)]


FLOAT = torch.float32
# op, what it takes, what it does not, and a word of the reason
ROWS = [
    (
        "embed",
        lambda d: embedding.supports(_zeros(d, 2, dtype=torch.int64), _zeros(d, 9, 8)),
        lambda d: embedding.supports(_zeros(d, 2, dtype=FLOAT), _zeros(d, 9, 8)),
        "ids are",
    ),
    (
        "router_logits",
        lambda d: router_logits.supports(_zeros(d, 2, 8), _zeros(d, 4, 8)),
        lambda d: router_logits.supports(_zeros(d, 2, 8).half(), _zeros(d, 4, 8)),
        "float16",
    ),
    (
        "rms_norm",
        lambda d: norm.supports(_zeros(d, 2, 8), _zeros(d, 8)),
        lambda d: norm.supports(_zeros(d, 2, 40000), _zeros(d, 40000)),
        "wider",
    ),
    (
        "sort_pairs",
        lambda d: permute.supports(_zeros(d, 2, 8, dtype=torch.int32)),
        lambda d: permute.supports(_zeros(d, 2, 8)),
        "ids are",
    ),
    (
        "router",
        lambda d: router.supports(_zeros(d, 2, 8, dtype=FLOAT), RouterSpec(2), None),
        lambda d: router.supports(_zeros(d, 2, 8192, dtype=FLOAT), RouterSpec(2), None),
        "8192",
    ),
    (
        "sample",
        lambda d: sampling.supports(_zeros(d, 2, 8)),
        lambda d: sampling.supports(_zeros(d, 2, 0)),
        "vocabulary of 0",
    ),
    (
        "linear",
        lambda d: linear.supports("int4", 256, d),
        lambda d: linear.supports("q5_k", 256, d),
        "no GPU layout",
    ),
    (
        "linear's inputs",
        lambda d: linear.supports("q4_k", 512, d),
        lambda d: linear.supports("q4_k", 384, d),
        "multiples of 256",
    ),
    (
        "linear's activations",
        lambda d: linear.supports("fp8", 256, d, "fp8"),
        lambda d: linear.supports("int8", 256, d, "fp8"),
        "fp8 activations",
    ),
    (
        "experts",
        lambda d: fused_moe.supports(LAYER, get_format("q6_k"), d),
        lambda d: fused_moe.supports(LAYER, get_format("q5_k"), d),
        "no GPU layout",
    ),
    (
        "mla_read",
        lambda d: mla_read.supports(_zeros(d, 2, 4, 8), _zeros(d, 2, 4, 2), None),
        lambda d: mla_read.supports(_zeros(d, 2, 4, 8).to(FP8), _zeros(d, 2, 4, 2), None),
        "without scales",
    ),
    (
        "gated_delta_rule",
        lambda d: gated_delta_rule.supports(*_rule(d, 32, FLOAT), _decode(d)),
        lambda d: gated_delta_rule.supports(*_rule(d, 32, BF16), _decode(d)),
        "state is torch.bfloat16",
    ),
    (
        "gated_delta_rule's heads",
        lambda d: gated_delta_rule.supports(*_rule(d, 128, FLOAT), _decode(d)),
        lambda d: gated_delta_rule.supports(*_rule(d, 256, FLOAT), _decode(d)),
        "heads of 256",
    ),
    (
        "causal_conv1d",
        lambda d: causal_conv1d.supports(*_conv(d, 4), _decode(d)),
        lambda d: causal_conv1d.supports(*_conv(d, 17), _decode(d)),
        "weight is (8, 17)",
    ),
    (
        "sigmoid_mul",
        lambda d: gate.supports(_zeros(d, 2, 3, 8), _zeros(d, 2, 3, 1)),
        lambda d: gate.supports(_zeros(d, 2, 3, 8), _zeros(d, 2, 3, 2)),
        "gate is",
    ),
    (
        "gated_rms_norm",
        lambda d: gate.supports(_zeros(d, 2, 3, 8), _zeros(d, 2, 3, 8), _zeros(d, 8)),
        lambda d: gate.supports(_zeros(d, 2, 3, 8), _zeros(d, 2, 3, 1), _zeros(d, 8)),
        "gate is",
    ),
]


@pytest.mark.parametrize(("op", "good", "bad", "word"), ROWS, ids=[row[0] for row in ROWS])
def test_a_reason_is_one_line(op: str, good, bad, word: str, device: torch.device) -> None:
    assert good(device) is None
    why = bad(device)
    assert why and word in why and "\n" not in why


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if Triton did not interpret."""
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    return monkeypatch


def test_gpus(compiled: pytest.MonkeyPatch) -> None:
    compiled.setattr(launch, "_driverless", lambda: None)
    for capability, word in (((7, 5), "7.5 is below 8.0"), ((8, 0), None), ((12, 0), None)):
        compiled.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        found = launch.supports(torch.device("cuda:0"))
        assert found is None if word is None else word in str(found)


def test_a_cpu_is_no_gpu(compiled: pytest.MonkeyPatch) -> None:
    for op, good, *_ in ROWS:
        assert "CUDA GPU, not on cpu" in good(torch.device("cpu")), op
    with pytest.raises(PykernelsError, match="no GPU kernel runs here"):
        norm.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6)


def test_without_a_c_compiler(compiled: pytest.MonkeyPatch) -> None:
    class Driver:
        @property
        def active(self) -> object:
            raise RuntimeError("Failed to find C compiler.\nPlease specify one")

    compiled.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    compiled.setattr(triton.runtime, "driver", Driver())
    launch._driverless.cache_clear()
    try:
        why = launch.supports(torch.device("cuda:0"))
    finally:
        launch._driverless.cache_clear()
    assert why == "Triton cannot launch: Failed to find C compiler. Please specify one"


def test_without_triton(compiled: pytest.MonkeyPatch) -> None:
    compiled.setattr(importlib.util, "find_spec", lambda name: None)
    assert "Triton is not installed" in str(launch.supports(torch.device("cuda:0")))


def test_tensors_of_another_gpu_are_refused(compiled: pytest.MonkeyPatch) -> None:
    compiled.setattr(launch, "supports", lambda device: None)
    compiled.setattr(torch.cuda, "current_device", lambda: 0)
    here, there = (SimpleNamespace(device=torch.device("cuda", i)) for i in (0, 1))
    assert launch.check_device(here, here) == torch.device("cuda:0")
    with pytest.raises(PykernelsError, match=r"current GPU, cuda:0.*torch.cuda.device\(1\)"):
        launch.check_device(there, there)


def _refused(d: torch.device) -> dict[str, Callable[[], object]]:
    """Calls that no kernel takes: as they are, some would write beside their buffers."""
    fmt = get_format("bf16")
    experts = fused_moe.GpuExperts.empty(fmt, 4, 64, 32, d)
    stack = gemm_weights.empty_for_gpu(fmt, 1, 32, 64, d)
    pair = gemm_weights.empty_for_gpu(fmt, 2, 32, 64, d)
    x, ids = _zeros(d, 3, 64), torch.tensor([[0, 1], [1, 2], [3, 0]], device=d)
    order = permute.sort_pairs(ids, 4)
    eight = fused_moe.GpuExperts.empty(get_format("fp8"), 4, 64, 64, d)
    spec, (logits, weights) = RouterSpec(2), (_zeros(d, 3, n, dtype=FLOAT) for n in (8, 2))
    h, y = _zeros(d, 6, 32), _zeros(d, 6, 64)
    gate_up, down, skinny = fused_moe.gate_up, fused_moe.down, SkinnyExpertsPlan(16, 4)
    lin, sort, route, logits_of = linear.linear, permute.sort_pairs, router.route, router_logits

    def routing(rows: int, dtype: torch.dtype) -> Routing:
        return Routing(_zeros(d, rows, 2, dtype=dtype), _zeros(d, rows, 2, dtype=FLOAT))

    at = torch.arange(2, device=d)
    return {
        "gate_up, few rows": lambda: gate_up(x, experts, order, out=_zeros(d, 5, 32)),
        "gate_up, into float32": lambda: gate_up(
            x, experts, order, out=_zeros(d, 6, 32, dtype=FLOAT)
        ),
        "gate_up, float32": lambda: gate_up(x.float(), experts, order),
        "gate_up, a plan to dequantize": lambda: gate_up(x, experts, order, plan=skinny),
        "gate_up, an order of other experts": lambda: gate_up(x, experts, sort(ids, 5)),
        "down, narrow": lambda: down(h, experts, order, out=_zeros(d, 6, 63)),
        "down, other rows": lambda: down(h[:5], experts, order),
        "down, scales of a double": lambda: down(
            y.to(FP8), eight, order, activations="fp8", h_scale=weights[:1].double()
        ),
        "up without a gate": lambda: fused_moe.GpuExperts(fmt, experts.down, experts.down),
        "biases that nobody asked for": lambda: replace(experts, down_bias=weights[:4]),
        "no biases": lambda: replace(experts, spec=ExpertSpec(bias=True)),
        "down as wide as gate": lambda: fused_moe.GpuExperts(fmt, eight.gate_up, experts.down),
        "linear, a stack of 2": lambda: lin(x, pair),
        "linear, fp8 and bf16": lambda: lin(x, stack, activations="fp8"),
        "linear, elsewhere": lambda: lin(
            x, stack, out=torch.empty(3, 32, dtype=BF16, device="meta")
        ),
        "linear, an integer bias": lambda: lin(x, stack, _zeros(d, 32, dtype=torch.int32)),
        "quantize_fp8, E4M3": lambda: quantize_fp8(_zeros(d, 3, 128, dtype=FP8)),
        "permute, other tokens": lambda: permute.permute(_zeros(d, 4, 8), order),
        "permute, narrow": lambda: permute.permute(x, order, _zeros(d, 6, 63)),
        "unpermute, few rows": lambda: permute.unpermute(y, order, weights, out=_zeros(d, 2, 64)),
        "unpermute, other rows": lambda: permute.unpermute(y[:5], order, weights),
        "unpermute, integers": lambda: permute.unpermute(y.int(), order, weights),
        "unpermute, rows to add with gaps": lambda: permute.unpermute(
            y, order, weights, _zeros(d, 3, 128)[:, ::2]
        ),
        "unpermute, starts elsewhere": lambda: permute.unpermute(
            y, replace(order, starts=order.starts.to("meta")), weights
        ),
        "sort, ids with gaps": lambda: sort(ids.repeat(1, 2)[:, ::2], 4),
        "sort, float ids": lambda: sort(weights, 4),
        "sort, another size": lambda: sort(ids, 4, permute.empty_order(2, 2, 4, d)),
        "sort, too many experts": lambda: sort(ids, permute.MAX_EXPERTS + 1),
        "router_logits, elsewhere": lambda: logits_of.router_logits(
            x, _zeros(d, 8, 64), torch.empty(3, 8, device="meta")
        ),
        "router_logits, a gate with gaps": lambda: logits_of.router_logits(
            x, _zeros(d, 8, 65)[:, :64]
        ),
        "router, bf16 logits": lambda: router.router(logits.bfloat16(), spec),
        "router, a long bias": lambda: router.router(logits, spec, _zeros(d, 9, dtype=FLOAT)),
        "router, more experts than there are": lambda: router.router(logits, RouterSpec(9)),
        "router, groups that do not divide": lambda: router.router(
            logits, RouterSpec(2, groups=3, group_topk=2)
        ),
        "router, too many choices": lambda: router.router(
            _zeros(d, 1, 4096, dtype=FLOAT), RouterSpec(4096)
        ),
        "router, an unknown score": lambda: RouterSpec(2, scoring="tanh"),
        "router, few rows": lambda: router.router(logits, spec, out=routing(2, torch.int64)),
        "router, float ids": lambda: router.router(logits, spec, out=routing(3, FLOAT)),
        "route, logits of no token": lambda: route(logits[0], spec),
        "route, other tokens": lambda: route(logits[:2], spec, None, x),
        "route, another order": lambda: route(
            logits[:1], spec, out=(routing(1, torch.int64), order, None)
        ),
        "rms_norm, another width": lambda: norm.rms_norm(x, _zeros(d, 63), 1e-6),
        "rms_norm, integers": lambda: norm.rms_norm(x.int(), _zeros(d, 64), 1e-6),
        "causal_conv1d, in place": lambda: causal_conv1d.causal_conv1d(
            (conv := _conv(d, 4))[0], *conv[1:], _decode(d), out=conv[0]
        ),
        "gated_delta_rule, 2 value heads on 3": lambda: gated_delta_rule.gated_delta_rule(
            *(_zeros(d, 2, 3, 16) for _ in "qk"), *_rule(d, 16, FLOAT)[2:], _decode(d)
        ),
        "delta_gates, rows for heads": lambda: gate.delta_gates(x, x, x, x),
        "embed, an empty table": lambda: embedding.embed(ids, _zeros(d, 0, 8)),
        "greedy, integers": lambda: sampling.greedy(x.int()),
        "greedy, into int32": lambda: sampling.greedy(x, _zeros(d, 3, dtype=torch.int32)),
        "count_tokens, a table of int64": lambda: sampling.count_tokens(
            at, at.int(), _zeros(d, 2, 9, dtype=torch.int64)
        ),
        "mla_read, one length": lambda: mla_read.mla_read(
            *(_zeros(d, 2, 4, n) for n in (8, 2)),
            order.positions,
            order.starts[0],
            order.starts[0],
            4,
        ),
    }


def test_what_no_kernel_takes_is_refused(device: torch.device) -> None:
    for what, call in _refused(device).items():
        with pytest.raises(PykernelsError) as refused:
            call()
            pytest.fail(f"{what} was taken")
        assert "\n" not in str(refused.value)


def test_a_layers_sum_is_checked_before_its_products(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_moe, "multiply", None)
    experts = fused_moe.GpuExperts.empty(get_format("bf16"), 4, 64, 32, device)
    x, ids = _zeros(device, 3, 64), torch.tensor([[0, 1], [1, 2], [3, 0]], device=device)
    weights = _zeros(device, 3, 2, dtype=FLOAT)
    for more in ({"weights": weights.bfloat16()}, {"add": x[:2]}, {"out": x[:2]}):
        with pytest.raises(PykernelsError, match="weights|add|out"):
            fused_moe.moe_ffn(x, ids, **{"weights": weights, "experts": experts, **more})


@pytest.mark.parametrize("fmt", ["bf16", "int8", "fp8"])
def test_nothing_to_compute(fmt: str, device: torch.device) -> None:
    for M, N in ((0, 32), (1, 0), (40, 0)):
        stack = gemm_weights.empty_for_gpu(get_format(fmt), 1, N, 128, device)
        assert linear.linear(_zeros(device, M, 128), stack).shape == (M, N)


def test_a_bias_may_have_gaps(device: torch.device) -> None:
    stack = gemm_weights.empty_for_gpu(get_format("bf16"), 1, 32, 64, device)
    stack.data.zero_()
    bias = torch.arange(64.0, device=device)[::2]
    y = linear.linear(_zeros(device, 1, 64), stack, bias)
    assert torch.equal(y[0], bias.bfloat16())
