"""The router: choices exactly the definition's, weights to float32's last bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pykernels import ref
from pykernels.gpu.moe import router as module
from pykernels.gpu.moe.router import MAX_TOPK, route, router
from pykernels.shapes import RouterSpec, Routing
from pykernels.testing import assert_close

V2 = RouterSpec(6, "softmax", False, groups=8, group_topk=3, scale=16.0)
V3 = RouterSpec(8, "sigmoid", True, groups=8, group_topk=4, group_score="top2", scale=2.5)

# name, E, spec, with a bias
SPECS = [
    ("mixtral: softmax, renormalized", 8, RouterSpec(2), False),
    ("qwen2: softmax as it is", 60, RouterSpec(4, renormalize=False), False),  # E not a power of 2
    ("deepseek v2: 8 groups of 20 by their best", 160, V2, False),
    ("deepseek v3: sigmoid, bias, groups by their two best", 256, V3, True),
    ("groups by two best, no bias", 32, replace(V3, topk=4, groups=4, group_topk=2), False),
    ("glm4: sigmoid, bias, one group", 128, RouterSpec(8, "sigmoid", scale=1.5), True),
    ("softmax with a bias", 64, RouterSpec(6), True),
    ("ernie: the same, divided by at least so much", 64, RouterSpec(6, min_sum=0.25), True),
    ("top-1 of 1", 1, RouterSpec(1), False),
    ("every expert", 7, RouterSpec(7), False),
    ("three groups of five", 15, RouterSpec(3, groups=3, group_topk=2), False),
]
IDS = [row[0] for row in SPECS]


def inputs(T: int, E: int, biased: bool, device: torch.device) -> tuple[torch.Tensor, ...]:
    bias = torch.randn(E, device=device) / 4 if biased else None
    return torch.randn(T, E, device=device) * 2, bias


@pytest.mark.parametrize("T", [1, 5, pytest.param(1030, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("name", "E", "spec", "biased"), SPECS, ids=IDS)
def test_router(
    name: str, E: int, spec: RouterSpec, biased: bool, T: int, device: torch.device
) -> None:
    logits, bias = inputs(T, E, biased, device)
    factors = torch.rand(E, device=device) + 0.5 if biased else None
    truth = ref.router(logits, spec, bias, factors=factors, dtype=torch.float64)
    ids = torch.full_like(truth.ids, -9, dtype=torch.int32 if T == 5 else torch.int64)
    out = Routing(ids, torch.full((T, spec.topk), torch.nan, device=device))
    slot_mapping = (
        torch.arange(T, dtype=torch.int32, device=device) % 3 - 1
    )  # every third is padding
    found = router(logits, spec, bias, slot_mapping, factors, out)
    assert found is out
    same = (found.ids == truth.ids.masked_fill(slot_mapping[:, None] < 0, -1)).all(-1)
    assert (~same).sum() <= T // 300  # scores within float32's rounding of each other
    assert_close(found.weights[same], truth.weights[same], 2e-6)


@pytest.mark.parametrize("spec", [RouterSpec(5), replace(V3, topk=5)], ids=["softmax", "v3"])
def test_of_equal_scores_the_lowest_comes_first(spec: RouterSpec, device: torch.device) -> None:
    rows = [torch.zeros(64), torch.arange(64) % 3, -(torch.arange(64) // 16), torch.arange(64) // 9]
    logits = torch.stack([row.float() for row in rows]).to(device)
    logits[0, ::2] = -0.0  # equal to +0
    bias = torch.zeros(64, device=device) if spec.scoring == "sigmoid" else None
    found = router(logits, spec, bias)
    assert torch.equal(found.ids, ref.router(logits, spec, bias).ids)
    assert spec.groups > 1 or found.ids[0].tolist() == [0, 1, 2, 3, 4]


def test_the_definition_is_what_transformers_does(device: torch.device) -> None:
    """DeepSeek-V3's own router, the most involved one."""
    v3 = pytest.importorskip("transformers.models.deepseek_v3")
    sizes = {"hidden_size": 16, "n_routed_experts": 32, "num_experts_per_tok": 4}
    config = v3.DeepseekV3Config(**sizes, n_group=4, topk_group=2)
    theirs = v3.modeling_deepseek_v3.DeepseekV3TopkRouter(config)
    torch.nn.init.normal_(theirs.weight)
    theirs.e_score_correction_bias.normal_()
    logits, weights, ids = theirs(torch.randn(9, 16))
    scale = config.routed_scaling_factor
    spec = RouterSpec(4, "sigmoid", config.norm_topk_prob, 4, 2, "top2", scale)
    found = router(logits.detach().to(device), spec, theirs.e_score_correction_bias.to(device))
    order, mine = ids.argsort(-1), found.ids.argsort(-1)
    assert torch.equal(found.ids.gather(1, mine).cpu(), ids.gather(1, order))
    assert_close(found.weights.gather(1, mine).cpu(), weights.detach().gather(1, order), 2e-6)


def test_a_nan_token_leaves_the_others_alone(device: torch.device) -> None:
    logits = torch.randn(6, 16, device=device)
    clean = router(logits, RouterSpec(2))
    logits[2] = torch.nan
    found = router(logits, RouterSpec(2))
    for mine, before in ((found.ids, clean.ids), (found.weights, clean.weights)):
        assert torch.equal(mine[[0, 1, 3, 4, 5]], before[[0, 1, 3, 4, 5]])
    assert found.weights[2].isnan().all() and (found.ids[2] < 16).all()


def test_only_experts_of_the_groups_taken_are_chosen(device: torch.device) -> None:
    """Also where theirs are all that is left of a group, and experts are switched off by -inf."""
    off = -torch.inf
    logits = torch.tensor([[1.0, 1, 1, 1, 5, off, off, off]], device=device)
    spec = RouterSpec(4, renormalize=False, groups=2)
    for found in (router(logits, spec), ref.router(logits, spec)):
        assert found.ids.tolist() == [[4, 5, 6, 7]]
        assert found.weights[0, 1:].tolist() == [0, 0, 0]
    bias = torch.tensor([0.0, 0, 0, 0, 9, 9, off, off], device=device)
    spec = replace(spec, scoring="sigmoid", group_score="top2")
    for found in (router(logits, spec, bias), ref.router(logits, spec, bias)):
        assert found.ids.tolist() == [[4, 5, 6, 7]]


@pytest.mark.parametrize("T", [0, 1, 2, 9, pytest.param(70, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("name", "E", "spec", "biased"), SPECS[2:5], ids=IDS[2:5])
def test_route_is_router_and_sort_and_permute(
    name: str, E: int, spec: RouterSpec, biased: bool, T: int, device: torch.device
) -> None:
    logits, bias = inputs(T, E, biased, device)
    x = torch.randn(T, 1030, device=device, dtype=torch.bfloat16)
    routing, order, rows = route(logits, spec, bias, x)
    truth = ref.router(logits, spec, bias, dtype=torch.float64)
    sorted_ = ref.sort_pairs(truth.ids, E)
    assert torch.equal(routing.ids, truth.ids)
    assert_close(routing.weights, truth.weights, 2e-6)
    for field in ("pairs", "starts", "positions"):
        assert torch.equal(getattr(order, field), getattr(sorted_, field)), field
    assert rows is not None and torch.equal(rows, ref.permute(x, sorted_))
    again = route(logits, spec, bias)
    assert torch.equal(again[1].pairs, order.pairs) and again[2] is None


def test_as_many_choices_as_there_may_be(device: torch.device, monkeypatch) -> None:
    """One token's are not compared in one launch, which would take a minute to compile."""
    monkeypatch.setattr(module, "_route_one", None)
    spec, E = RouterSpec(MAX_TOPK), 2048
    logits, x = torch.randn(1, E, device=device), torch.randn(1, 40, device=device)
    routing, order, rows = route(logits, spec, None, x)
    truth = ref.router(logits, spec)
    assert torch.equal(routing.ids, truth.ids)
    assert torch.equal(order.pairs, ref.sort_pairs(truth.ids, E).pairs)
    assert rows is not None and torch.equal(rows, x.expand(MAX_TOPK, -1))


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


COMPILES = [
    ("v3, 8192 tokens", lambda: router(_meta(8192, 256), V3, _meta(256))),
    (
        "v3, 1 token with its rows",
        lambda: route(_meta(1, 256), V3, _meta(256), _meta(1, 7168, dtype=torch.bfloat16)),
    ),
    (
        "qwen3 with padding",
        lambda: router(_meta(64, 128), RouterSpec(8), slot_mapping=_meta(64, dtype=torch.int32)),
    ),
    ("several groups in a warp's row", lambda: route(_meta(4, 32), SPECS[4][2])),
    ("fewer experts than a warp has lanes", lambda: route(_meta(1, 16), RouterSpec(2))),
]
COMPILES_ON_A_GPU = [
    ("qwen3, 1 token", lambda: router(_meta(1, 128), RouterSpec(8))),
    ("v2, 8192 tokens", lambda: router(_meta(8192, 160), V2)),
    ("most choices, 1 token", lambda: route(_meta(1, 4096), RouterSpec(MAX_TOPK))),
]
