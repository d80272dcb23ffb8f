"""The GPU's cases, tiny and interpreted: they run, peers compute the same, bytes are honest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.against.routers import KINDS
from bench.cases import attention, linear, moe, router, small_ops
from bench.cases.attention import build
from bench.cases.attention_size import Size
from bench.cases.step import delta_net, unpack_tiles
from bench.cases.step import ops as step_ops
from bench.cases.truth import MOST
from bench.cases.weights import activations_for, random_experts
from pykernels.testing import relative_error

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")

CPU = torch.device("cpu")
V3, PLAIN = KINDS["v3"](4), KINDS["softmax"](2)


@pytest.fixture(autouse=True)
def one_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attention, delta_net, linear, router, small_ops, unpack_tiles):
        monkeypatch.setattr(module, "sets_for", lambda nbytes, device: 1)


ROUTE = 64 + 2 * 20 + 4 * 17  # float32 logits; 2 slots of id, weight, slot, position; starts
SMALL: dict[str, tuple[Any, Any, int]] = {
    "route": (router.route_case, (1, 16, 64, PLAIN, False, False), ROUTE),
    # a bias is read only where there is one
    "biased": (router.route_case, (1, 32, 64, V3, True, False), 128 + 128 + 4 * 20 + 4 * 33),
    # a row read once, written for each slot
    "gather": (router.route_case, (1, 16, 64, PLAIN, False, True), ROUTE + 2 * 64 * 3),
    # a float32 gate and the token's row in; the row for each slot out; no logits
    "step": (
        router.step_case,
        (1, 64, 64, V3),
        4 * 64 * 64 + 2 * 64 + 4 * 64 + 4 * 20 + 4 * 65 + 2 * 4 * 64,
    ),
    "gate": (router.gate_case, (2, 8, 64, torch.float32), 4 * 8 * 64 + 2 * 2 * 64 + 4 * 2 * 8),
    "router": (router.router_case, (9, 32, V3), 4 * (9 * 32 + 32) + 12 * 36),
    "sort": (router.sort_case, (9, 32, V3), 16 * 36 + 4 * 33),
    "permute": (router.rows_case, (9, 32, 16, V3, False), 2 * 45 * 16 + 4 * 36),
    "unpermute": (router.rows_case, (9, 32, 16, V3, True), 2 * 45 * 16 + 8 * 36),
    # x, residual and both results; the weight once
    "norm": (small_ops.norm_case, (3, 64), 4 * 3 * 64 * 2 + 64 * 2),
    "embed": (small_ops.embed_case, (3, 50, 64), 2 * 3 * 64 * 2 + 3 * 8),
    "mla_read": (small_ops.mla_read_case, (2, 128, False), 256 * 576 * 2 * 2),
    "mla_read fp8": (small_ops.mla_read_case, (2, 128, True), 256 * (512 + 4 + 128 + 576 * 2)),
    "greedy": (small_ops.sample_case, (2, 300, "greedy"), 2 * 300 * 4),
    "sample": (small_ops.sample_case, (1, 300, "top-k, top-p"), 300 * 4),
    # queries, keys and values read and written; angles and slots
    "gqa_rope_cache_write": (step_ops.gqa_write_case, (3, 4, 2, 32), 3 * (2 * 512 + 128 + 8)),
    "mla_rope_cache_write": (step_ops.mla_write_case, (3, 4), 3 * (4 * (256 + 576) + 256 + 8)),
    "per_head_linear": (step_ops.per_head_case, (3, 2, 32, 48), 4 * (32 * 48 + 3 * 80)),
    "combine": (step_ops.combine_case, (3, 64), 3 * 64 * 20 + 128),
    # codes of 8 bits are read and written; a scale for 32 rows, one for 128
    "unpack_tiles": (
        unpack_tiles.unpack_case,
        ("fp8", "fp8", 1, 128, 128),
        2 * 3 * 128 * 128 + 4 * 3 * (4 + 1),
    ),
}
ALIKE = (
    "unpermute",
    "norm",
    "embed",
    "mla_read",
    "mla_read fp8",
    "greedy",
    "gqa_rope_cache_write",
    "mla_rope_cache_write",
    "per_head_linear",
    "combine",
)


@pytest.mark.parametrize("name", SMALL)
def test_a_case_moves_what_it_reads_and_writes(name: str) -> None:
    make, sizes, nbytes = SMALL[name]
    case = make(*sizes, CPU)
    assert case.nbytes == nbytes
    assert case.error is None or case.error() < MOST
    ours: Any = case.run()
    theirs: Any = [peer() for peer in case.peers.values()][0]
    if name in ALIKE:
        pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
        for mine, other in pairs:
            other = other.reshape(mine.shape).float()
            torch.testing.assert_close(mine.float(), other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("tokens", [1, 17])
def test_a_delta_net_reads_and_writes_its_states(tokens: int) -> None:
    found = delta_net.case(CPU, 2, tokens)
    # queries, keys, values, results; decay and beta
    a_token = 2 * (2 * 16 + 2 * 32) * 128 + 2 * 4 * 32
    assert found.nbytes == 2 * (2 * 4 * 32 * 128 * 128 + tokens * a_token)
    assert found.error is not None and found.error() < MOST


@pytest.mark.parametrize("format", ["bf16", "fp8", "int8-channel", "int4", "q4_k", "q6_k"])
def test_random_matrices_give_results_of_a_models_size(format: str) -> None:
    case = linear.case(CPU, format, 2, 256, 32)
    found = case.run()
    assert isinstance(found, torch.Tensor) and 0.05 < float(found.float().std()) < 20
    assert case.error is not None and case.error() < MOST


def test_a_linear_reads_its_weights_and_scales_once() -> None:
    found = linear.case(CPU, "int4", 3, 256, 32)
    assert found.nbytes == 32 * 256 // 2 + 32 * 256 // 32 * 2 + 3 * 256 * 2 + 3 * 32 * 2
    assert found.flops == 2 * 3 * 256 * 32
    assert [activations_for("fp8", rows, "auto") for rows in (16, 17)] == ["bf16", "fp8"]


def test_a_layer_reads_the_experts_that_it_touches() -> None:
    one = moe.case(CPU, "fp8", 1, 128, 128, 8, 2)
    result = one.run()
    assert isinstance(result, torch.Tensor) and result.isfinite().all()
    experts = random_experts("fp8", 8, 128, 128, CPU)
    assert one.nbytes == 2 * (2 * experts.gate_up.nbytes + experts.down.nbytes) + 4 * 128
    assert one.flops == 2 * 6 * 128 * 128
    parts = {case.name: case for case in moe.product_cases(experts, "fp8", 8, 2, "fp8")}
    assert set(parts) == {"gate_up", "down", "quantize_fp8 sorted"}
    for case in (one, *parts.values()):
        assert case.error is not None and case.error() < MOST, case.name
    assert parts["gate_up"].flops == 2 * parts["down"].flops == 4 * 16 * 128 * 128


def test_torchs_grouped_products_compute_the_same() -> None:
    ids = moe.route(32, 8, 3, "balanced", CPU)
    assert ids.flatten().bincount(minlength=8).tolist() == [12] * 8
    experts = random_experts("bf16", 4, 128, 64, CPU)
    layer = moe.layer_case(experts, "bf16", 6, 2, "balanced", "bf16")
    for case in (layer, *moe.product_cases(experts, "bf16", 6, 2, "bf16")):
        ours, theirs = case.run(), case.peers["torch_grouped_mm"]()
        assert isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)
        assert relative_error(ours, theirs) < 2e-2


GQA: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 32}
ONE: dict[str, Any] = {"heads": 1, "kv_heads": 1, "head_dim": 32}
ATTENTION = [
    (
        Size("gqa_decode", 2, 128, **GQA),
        2 * 128 * 2 * 2 * 32 * 2 + 2 * 2 * 2 * 4 * 32,
        2 * 4 * 128 * 2 * 2 * 32,
    ),
    (
        Size("mla_decode", 2, 128, heads=4),
        2 * 128 * 576 * 2 + 2 * 4 * (576 + 512) * 2,
        2 * 128 * 4 * (576 + 512) * 2,
    ),
    (
        Size("mla_decode", 1, 70, heads=4, format="fp8", new=3),
        70 * (512 + 64 * 2 + 4) + 2 * 3 * 4 * (576 + 512),
        (68 + 69 + 70) * 4 * (576 + 512) * 2,
    ),
    # each of the three queries attends to four keys
    (
        Size("gqa_decode", 1, 9, **GQA, new=3, window=4),
        6 * 2 * 2 * 32 * 2 + 3 * 2 * 2 * 4 * 32,
        4 * 4 * (4 + 4 + 4) * 32,
    ),
    (
        Size("mla_prefill", 2, 8, heads=2),
        2 * 2 * 8 * 2 * (192 + 128) + 2 * 8 * 2 * (2 * 128 + 64 + 2 * 128),
        2 * 2 * 36 * 2 * 320,
    ),
    # q and out, k and v
    (Size("gqa_prefill", 1, 8, **ONE, new=2), 2 * 32 * (2 * 2 + 2 * 8), (7 + 8) * 2 * 2 * 32),
    # no key before the window; the peers would have to be compiled
    (
        Size("gqa_prefill", 1, 90, **GQA, new=16, window=20, keys="pages"),
        2 * 32 * (2 * 16 * 4 + 2 * 35 * 2),
        16 * 20 * 4 * 4 * 32,
    ),
    # a scale a token and head
    (
        Size("gqa_prefill", 1, 8, **ONE, format="fp8", keys="pages"),
        2 * 8 * (2 * 32 + 32 + 4),
        36 * 2 * 2 * 32,
    ),
]


@pytest.mark.parametrize(("size", "nbytes", "flops"), ATTENTION, ids=range(len(ATTENTION)))
def test_attention_counts_the_keys_of_its_mask(size: Size, nbytes: int, flops: int) -> None:
    """And torch computes the same where it has what the case needs."""
    case = build(size, CPU)
    assert (case.nbytes, case.flops) == (nbytes, flops)
    assert case.error is not None and case.error() < MOST
    ours: Any = case.run()
    for name in {"torch sdpa", "torch matmul", "torch sdpa grouped"} & set(case.peers):
        theirs: Any = case.peers[name]()
        if size.kind == "mla_decode":
            theirs = theirs[:, 0]  # heads were its queries
        theirs = theirs.reshape(ours.shape) if size.decode else theirs.transpose(1, 2).flatten(0, 1)
        assert relative_error(theirs, ours) < 0.02, name
