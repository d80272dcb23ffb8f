"""The attention cases at small sizes: ours and torch's peers compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.gpu import attention
from bench.gpu.attention import Size, build
from bench.gpu.harness import Call
from pykernels.errors import PykernelsError
from pykernels.testing import relative_error

SMALL = [
    Size("mla_decode", 2, 130, heads=4),
    Size("gqa_decode", 2, 130, heads=4, kv_heads=2, head_dim=32),
    Size("mla_prefill", 2, 40, heads=2),
    Size("gqa_prefill", 2, 40, heads=4, kv_heads=2, head_dim=32),
    Size("gqa_prefill", 1, 60, heads=4, kv_heads=2, head_dim=32, new=16),
]


def result(call: Call) -> torch.Tensor:
    found = call()
    assert isinstance(found, torch.Tensor)
    return found.clone()


def tokens_first(size: Size, theirs: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """A peer's result in the shape of ours."""
    if size.kind == "mla_decode":
        return theirs[:, 0]  # heads were its queries
    if size.kind == "gqa_decode":
        return theirs.reshape(ours.shape)
    return theirs.transpose(1, 2).flatten(0, 1)


@pytest.mark.parametrize("size", SMALL, ids=[size.kind for size in SMALL])
def test_peers_compute_what_we_compute(size: Size, monkeypatch: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("for the CPU: on a GPU the benchmark itself runs them")
    monkeypatch.setattr(attention, "sets_for", lambda nbytes, device: 2)
    case = build(size, torch.device("cpu"))
    assert case.sets == 2 and case.flops > 0 and case.nbytes > 0
    ours = result(case.run)
    compared = 0
    for name, peer in case.peers.items():
        if name not in ("torch flex", "torch cudnn", "flashinfer"):  # compiled; CUDA's alone
            assert relative_error(tokens_first(size, result(peer), ours), ours) < 0.02, name
            compared += 1
    assert compared


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gqa_decode", {"window": 20}),
        ("gqa_decode", {"format": "fp8"}),
        ("mla_decode", {"format": "fp8"}),
        ("mla_decode", {"new": 3}),
        ("gqa_decode", {"new": 3, "window": 20}),
        ("gqa_prefill", {"keys": "pages"}),
        ("gqa_prefill", {"keys": "pages", "format": "fp8", "new": 16, "window": 20}),
    ],
)
def test_cases_without_peers_run(kind: str, options: dict[str, Any]) -> None:
    if torch.cuda.is_available():
        pytest.skip("for the CPU")
    sizes: dict[str, Any] = {"kv_heads": 2, "head_dim": 32} if kind.startswith("gqa") else {}
    case = build(Size(kind, 1, 70, heads=4, **sizes, **options), torch.device("cpu"))
    assert not result(case.run).isnan().any() and not case.peers


def test_bytes_and_operations_are_those_of_the_keys_seen() -> None:
    cpu = torch.device("cpu")
    decode = build(Size("gqa_decode", 2, 128, heads=4, kv_heads=2, head_dim=32), cpu)
    assert decode.nbytes == 2 * 128 * 2 * 2 * 32 * 2 + 2 * 2 * 2 * 4 * 32
    assert decode.flops == 2 * 4 * 128 * 2 * 2 * 32
    decode = build(Size("mla_decode", 2, 128, heads=4), cpu)
    assert decode.nbytes == 2 * 128 * 576 * 2 + 2 * 4 * (576 + 512) * 2
    assert decode.flops == 2 * 128 * 4 * (576 + 512) * 2
    steps = build(Size("gqa_decode", 1, 9, heads=4, kv_heads=2, head_dim=32, new=3, window=4), cpu)
    assert steps.flops == 4 * 4 * (4 + 4 + 4) * 32  # each of the three sees four keys
    assert steps.nbytes == 6 * 2 * 2 * 32 * 2 + 3 * 2 * 2 * 4 * 32
    assert steps.params["new"] == 3 and "new" not in decode.params
    assert result(steps.run).shape == (1, 3, 4, 32)
    prefill = build(Size("gqa_prefill", 1, 8, heads=1, kv_heads=1, head_dim=32, new=2), cpu)
    assert prefill.flops == (7 + 8) * 2 * 2 * 32
    assert prefill.nbytes == 2 * 32 * (2 * 2 + 2 * 8)  # q and out, k and v
    windowed = Size("gqa_prefill", 1, 90, heads=4, kv_heads=2, head_dim=32, new=16, window=20)
    assert build(windowed, cpu).nbytes == 2 * 32 * (2 * 16 * 4 + 2 * 35 * 2)  # no key before
    codes = Size("gqa_prefill", 1, 8, 1, kv_heads=1, head_dim=32, format="fp8", keys="pages")
    assert build(codes, cpu).nbytes == 2 * 8 * (2 * 32 + 32 + 4)  # a scale a token and head


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"kind": "flash"}, "no attention"),
        ({"kind": "mla_decode", "format": "int4"}, "no int4 cache"),
        ({"kind": "gqa_prefill", "format": "fp8"}, "bf16"),
        ({"kind": "mla_prefill", "format": "fp8"}, "bf16"),
        ({"kind": "mla_prefill", "keys": "pages"}, "only gqa_prefill"),
        ({"kind": "gqa_decode", "keys": "pages"}, "only gqa_prefill"),
        ({"kind": "gqa_prefill", "keys": "heap"}, "do not lie"),
        ({"kind": "mla_decode", "window": 9}, "no window"),
        ({"kind": "mla_prefill", "kv_heads": 4}, "no kv_heads"),
        ({"kind": "mla_decode", "head_dim": 64}, "no head_dim"),
        ({"kind": "gqa_decode", "context": 8, "new": 9}, "new tokens"),
        ({"kind": "gqa_prefill", "context": 8, "new": 9}, "new tokens"),
    ],
)
def test_bad_flags_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(PykernelsError, match=complaint):
        Size(**options)
