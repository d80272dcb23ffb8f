"""A call's inputs: read by value in any layout, memory for all pairs, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pykernels import cpu
from pykernels.errors import PykernelsError
from pykernels.shapes import MoEShape

from ..routed import SHAPE as LAYER
from ..routed import inputs, load

RAGGED = MoEShape(E=4, H=200, I=72, topk=2)


@pytest.mark.parametrize("gemm_from", [1, 2, 5, 40])
def test_buffers_hold_any_distribution_of_slots(gemm_from):
    """Rows of tiles, rows of the GEMM, and its pairs of A tiles, which are each expert's own."""
    E, H, I = 3, 128, 256  # noqa: E741
    for S in (1, 6, 31, 33, 80):
        memory = cpu.MoEWorkspace().reserve(S, 1, E, H, I, gemm_from, None, None)
        for first, second in product(range(S + 1), repeat=2):
            counts = [first, second, S - first - second]
            if counts[2] < 0:
                continue
            many = [n for n in counts if n >= gemm_from]
            assert len(memory["h"]) >= S - sum(many)
            assert len(memory["h_gemm"]) >= sum(many)
            groups = sum(2 * -(-n // 32) for n in many)
            assert len(memory["x_tiles"]) >= groups * 16 * H
            assert len(memory["h_tiles"]) >= groups * 16 * I


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
