"""Every GPU op as a row: what makes its inputs, and a call of it on them.

One table for what is asked of all ops alike (see ``test_captured.py`` and ``test_guards.py``): each
tensor that a kernel sees is in the dict that ``make`` returns, results included, so that a test may
put all of them where it likes. Sizes are those of a model on a GPU, tiny in the interpreter; the
device "meta" stands for a GPU (``launches.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pykernels.gpu.common.bandwidth import read
from pykernels.gpu.embedding import embed
from pykernels.gpu.moe.permute import permute, sort_pairs, unpermute
from pykernels.gpu.moe.place_routing import place_routing
from pykernels.gpu.moe.rank_experts import rank_experts
from pykernels.gpu.moe.router import route, router
from pykernels.gpu.moe.router_logits import router_logits
from pykernels.gpu.moe.split_routing import split_routing
from pykernels.gpu.moe.tiles.gather import gather_rows
from pykernels.gpu.norm import rms_norm
from pykernels.gpu.quantize import quantize_fp8
from pykernels.gpu.sampling import greedy
from pykernels.shapes import RouterSpec, Routing, SortedPairs

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Op:
    """One op at one size.

    Attributes:
        make: fresh random inputs on a device, and results full of NaN or -1; the same shapes each
            time, other values, lengths and experts.
        run: the op on such tensors; what it returns counts as a result.
        written: the tensors that ``run`` writes to.
    """

    name: str
    make: Callable[[torch.device], Tensors]
    run: Callable[[Tensors], object]
    written: tuple[str, ...] = ("out",)

    def results(self, given: Tensors) -> list[torch.Tensor]:
        """``run``'s results: what it returns, and what it wrote to."""
        found = self.run(given)
        returned = found if isinstance(found, tuple) else (found,)
        tensors = [x for x in returned if isinstance(x, torch.Tensor)]
        return tensors + [given[name] for name in self.written]


def bits(x: torch.Tensor) -> torch.Tensor:
    """A copy of the bytes: NaN equals NaN."""
    return x.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def normal(device: torch.device, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def integers(device: torch.device, below: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(below, shape, device=device).to(dtype)


def empty(device: torch.device, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Results to be: every byte 0xFF, which is NaN in all floats here and -1 in integers."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.full((size,), 255, dtype=torch.uint8, device=device).view(dtype).view(shape)


def large(device: torch.device, big: int, small: int) -> int:
    return small if device.type == "cpu" else big


def order_of(given: Tensors) -> SortedPairs:
    return SortedPairs(given["pairs"], given["starts"], given["positions"])


def order_buffers(d: torch.device, T: int, topk: int, E: int) -> Tensors:
    shapes = {"pairs": (T * topk,), "starts": (E + 1,), "positions": (T, topk)}
    return {name: empty(d, *shape, dtype=torch.int32) for name, shape in shapes.items()}


def choices(device: torch.device, T: int, topk: int, E: int) -> torch.Tensor:
    """int64 [T, topk]: distinct experts, low ones crowded, the last one never."""
    odds = 1 / torch.arange(1, E, device=device).float()
    return odds.expand(T, -1).multinomial(topk)


FP32, ORDER = torch.float32, ("pairs", "starts", "positions")
V3 = RouterSpec(8, "sigmoid", True, groups=8, group_topk=4, group_score="top2", scale=2.5)
SMALL_V3 = RouterSpec(4, "sigmoid", True, groups=4, group_topk=2, group_score="top2", scale=2.5)


def _route(T: int) -> Op:
    """One token by one launch, with the gather; else in parts."""

    def sizes(device: torch.device) -> tuple[RouterSpec, int, int]:
        return (SMALL_V3, 32, 40) if device.type == "cpu" else (V3, 256, 7168)

    def make(device: torch.device) -> Tensors:
        spec, E, H = sizes(device)
        return {
            "logits": normal(device, T, E, dtype=FP32),
            "bias": normal(device, E, dtype=FP32) / 4,
            "x": normal(device, T, H),
            "ids": empty(device, T, spec.topk, dtype=torch.int64),
            "weights": empty(device, T, spec.topk, dtype=FP32),
            "rows": empty(device, T * spec.topk, H),
            **order_buffers(device, T, spec.topk, E),
        }

    def run(t: Tensors) -> None:
        out = (Routing(t["ids"], t["weights"]), order_of(t), t["rows"])
        route(t["logits"], sizes(t["logits"].device)[0], t["bias"], t["x"], out=out)

    return Op(f"route {T} tokens", make, run, ("ids", "weights", "rows", *ORDER))


def _router(E: int, spec: RouterSpec) -> Op:
    def make(device: torch.device) -> Tensors:
        T = large(device, 300, 5)
        ids, weights = (empty(device, T, spec.topk, dtype=kind) for kind in (torch.int32, FP32))
        return {"logits": normal(device, T, E, dtype=FP32), "ids": ids, "weights": weights}

    def run(t: Tensors) -> None:
        router(t["logits"], spec, out=Routing(t["ids"], t["weights"]))

    return Op(f"router of {E}", make, run, ("ids", "weights"))


def _split_routing(T: int) -> Op:
    def make(device: torch.device) -> Tensors:
        ids = integers(device, 61, T, 8, dtype=torch.int32) - 1
        outs = {name: empty(device, T, 8, dtype=torch.int32) for name in ("first", "last")}
        return {"ids": ids, "weights": torch.rand(T, 8, device=device), **outs}

    def run(t: Tensors) -> None:
        split_routing(t["ids"], t["weights"], 3, (t["first"], t["last"]))

    return Op(f"split_routing {T} tokens", make, run, ("first", "last"))


def _place_routing(T: int) -> Op:
    def make(device: torch.device) -> Tensors:
        E, topk = 128, 8
        slots = torch.randperm(E, device=device)[:E].to(torch.int32) - 64
        ids = integers(device, E + 1, T, topk, dtype=torch.int32) - 1
        outs = {name: empty(device, T, topk, dtype=torch.int32) for name in ("here", "there")}
        return {"ids": ids, "slots": slots, **outs}

    def run(t: Tensors) -> None:
        place_routing(t["ids"], t["slots"], (t["here"], t["there"]))

    return Op(f"place_routing of {T}", make, run, ("here", "there"))


def _rank_experts(T: int) -> Op:
    def make(device: torch.device) -> Tensors:
        E, topk, count = 128, 8, 50
        ids = integers(device, E + 1, T, topk, dtype=torch.int32) - 1
        sizes = {"slots": E, "order": count}
        return {"ids": ids} | {n: empty(device, N, dtype=torch.int32) for n, N in sizes.items()}

    def run(t: Tensors) -> None:
        rank_experts(t["ids"], 128, 50, (t["slots"], t["order"]))

    return Op(f"rank_experts of {T}", make, run, ("slots", "order"))


def _gather_rows(count: int) -> Op:
    def make(device: torch.device) -> Tensors:
        E, words = 16, 5000
        order = torch.randperm(E, device=device).to(torch.int32)
        source = integers(device, 1 << 30, E, words, dtype=torch.int32)
        return {
            "source": source,
            "order": order,
            "out": empty(device, count, words, dtype=torch.int32),
        }

    def run(t: Tensors) -> None:
        gather_rows(t["source"], t["order"], 2, t["out"])

    return Op(f"gather_rows {count} experts", make, run, ("out",))


def _gate(T: int, dtype: torch.dtype) -> Op:
    def make(device: torch.device) -> Tensors:
        E, H = large(device, 256, 18), large(device, 7168, 520)
        gate, out = normal(device, E, H, dtype=dtype), empty(device, T, E, dtype=FP32)
        return {"x": normal(device, T, H), "gate": gate, "out": out}

    name = f"gate {T} tokens, {dtype}"
    return Op(name, make, lambda t: router_logits(t["x"], t["gate"], t["out"]))


def _sort(T: int) -> Op:
    return Op(
        f"sort {T} tokens",
        lambda d: {"ids": choices(d, T, 6, 50), **order_buffers(d, T, 6, 50)},
        lambda t: sort_pairs(t["ids"], 50, order_of(t)) and (),
        ORDER,
    )


def _rows(name: str, H: int) -> Op:
    """``permute`` and ``unpermute`` of 70 tokens; the order belongs to the inputs."""

    def make(device: torch.device) -> Tensors:
        T = large(device, 70, 6)
        order = sort_pairs(choices(device, T, 4, 20), 20)
        few, many = (T, 4 * T) if name == "permute" else (4 * T, T)
        return {
            "x": normal(device, few, H),
            **{part: getattr(order, part) for part in ORDER},
            "out": empty(device, many, H),
            "weights": torch.rand(T, 4, device=device),
            "add": normal(device, T, H),
        }

    def run(t: Tensors) -> torch.Tensor:
        if name == "permute":
            return permute(t["x"], order_of(t), t["out"])
        return unpermute(t["x"], order_of(t), t["weights"], t["add"], t["out"])

    return Op(f"{name} rows of {H}", make, run)


def _norm(H: int) -> Op:
    def make(device: torch.device) -> Tensors:
        made = {name: normal(device, 9, H) for name in ("x", "residual")}
        made |= {name: empty(device, 9, H) for name in ("out", "total")}
        return made | {"weight": normal(device, H)}

    def run(t: Tensors) -> None:
        rms_norm(t["x"], t["weight"], 1e-6, t["residual"], (t["out"], t["total"]))

    return Op(f"rms_norm of {H}", make, run, ("out", "total"))


AROUND = (
    _route(1),
    _route(7),
    _router(128, RouterSpec(8)),
    _router(60, RouterSpec(4)),
    _split_routing(37),
    _place_routing(37),
    _rank_experts(300),
    _gather_rows(3),
    _gate(1, FP32),
    _gate(5, BF16),
    _gate(40, FP32),
    _sort(13),
    _sort(700),
    _rows("permute", 2500),
    _rows("unpermute", 2500),
    _norm(7168),
    _norm(100),
    Op(
        "embed",
        lambda d: {
            "ids": integers(d, 99, 5, dtype=torch.int64),
            "table": normal(d, 99, H := large(d, 7168, 40)),
            "out": empty(d, 5, H),
        },
        lambda t: embed(t["ids"], t["table"], out=t["out"]),
    ),
    Op(
        "greedy",
        lambda d: {
            "logits": normal(d, 4, large(d, 129_280, 5000)),
            "out": empty(d, 4, dtype=torch.int64),
        },
        lambda t: greedy(t["logits"], t["out"]),
    ),
    Op("quantize_fp8", lambda d: {"x": normal(d, 21, 320)}, lambda t: quantize_fp8(t["x"]), ()),
    Op(
        "read",
        lambda d: {"x": integers(d, 99, 50_000, dtype=torch.int32)},
        lambda t: read(t["x"]),
        (),
    ),
)
