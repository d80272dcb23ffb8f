"""Router, sort and permute: DeepSeek-V3's layer (256 experts, top-8, 7168 wide) and others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.against.routers import router_of
from bench.harness.timing.case import Case, Entry, rotating, sets_for
from pykernels.gpu.moe.permute import permute, sort_pairs, unpermute
from pykernels.gpu.moe.router import route, router
from pykernels.gpu.moe.router_logits import router_logits
from pykernels.ref import permute as permuted
from pykernels.ref import router_logits as logits_of
from pykernels.ref import unpermute as unpermuted
from pykernels.shapes import RouterSpec
from pykernels.testing import relative_error

from . import truth
from .peers.router_torch import torch_router, torch_sort

V3 = RouterSpec(8, "sigmoid", True, groups=8, group_topk=4, group_score="top2", scale=2.5)
V2 = RouterSpec(6, "softmax", False, groups=8, group_topk=3, scale=16.0)


def _logits(T: int, E: int, sets: int, device: torch.device) -> list[torch.Tensor]:
    return [torch.randn(T, E, device=device) for _ in range(sets)]


def _routing_bytes(E: int, slots: int, biased: bool) -> int:
    """The bias, if there is one, read; ids (int64), weights, slots, positions, starts written."""
    return 4 * E * biased + slots * (8 + 4 + 4 + 4) + 4 * (E + 1)


def route_case(
    T: int, E: int, H: int, spec: RouterSpec, biased: bool, rows: bool, device: torch.device
) -> Case:
    """Router and sort; with ``rows`` the tokens' bf16 rows gathered too."""
    nbytes = 4 * T * E + _routing_bytes(E, T * spec.topk, biased)
    nbytes += rows * 2 * T * H * (1 + spec.topk)
    sets = min(sets_for(nbytes, device), 8 if T > 1000 else 64)
    bias = torch.randn(E, device=device) / 4 if biased else None
    x = [
        torch.randn(T, H, device=device, dtype=torch.bfloat16) if rows else None
        for _ in range(sets)
    ]
    inputs = [(a, b) for a, b in zip(_logits(T, E, sets, device), x, strict=True)]
    out = route(inputs[0][0], spec, bias, inputs[0][1])

    def peer(logits: torch.Tensor, x: torch.Tensor | None) -> object:
        ids, weights = torch_router(logits, spec, bias)
        slots, starts, positions = torch_sort(ids, E)
        gathered = None if x is None else x[slots // spec.topk]
        return ids, weights, slots, starts, positions, gathered

    def ours(logits: torch.Tensor, x: torch.Tensor | None) -> Any:
        return route(logits, spec, bias, x, out=out)

    return Case(
        "router",
        "route and gather" if rows else "route",
        {
            "tokens": T,
            "experts": E,
            "topk": spec.topk,
            "scoring": spec.scoring,
            "groups": spec.groups,
            **({"hidden": H} if rows else {}),
        },
        rotating(ours, inputs),
        nbytes,
        0,
        {"torch": rotating(peer, inputs)},
        sets,
        error=lambda: truth.route_error(ours(*inputs[0]), inputs[0][0], spec, bias, inputs[0][1]),
    )


def gate_case(T: int, E: int, H: int, gate_dtype: torch.dtype, device: torch.device) -> Case:
    """The float32 logits: bf16 tokens, a gate of bf16 or float32."""
    gate_bytes = E * H * gate_dtype.itemsize
    nbytes = gate_bytes + 2 * T * H + 4 * T * E
    sets = min(sets_for(nbytes, device), 32)
    inputs = [
        (
            torch.randn(T, H, device=device, dtype=torch.bfloat16),
            (torch.randn(E, H, device=device) / H**0.5).to(gate_dtype),
        )
        for _ in range(sets)
    ]
    return Case(
        "router",
        "gate",
        {"tokens": T, "experts": E, "hidden": H, "gate": str(gate_dtype).removeprefix("torch.")},
        rotating(router_logits, inputs),
        nbytes,
        2 * T * E * H,
        {"torch float32": rotating(lambda x, w: x.float() @ w.float().T, inputs)},
        sets,
        error=lambda: relative_error(router_logits(*inputs[0]), logits_of(*inputs[0])),
    )


def step_case(T: int, E: int, H: int, spec: RouterSpec, device: torch.device) -> Case:
    """Gate, router and sort, and for one token its rows: all that lies before the experts.

    The logits count no bytes: they are no result.
    """
    few = T <= 8
    nbytes = 4 * E * H + 2 * T * H + _routing_bytes(E, T * spec.topk, biased=True)
    nbytes += 2 * T * spec.topk * H * few
    sets = min(sets_for(nbytes, device), 32)
    bias = torch.randn(E, device=device) / 4
    inputs = [
        (
            torch.randn(T, H, device=device, dtype=torch.bfloat16),
            torch.randn(E, H, device=device) / H**0.5,
        )
        for _ in range(sets)
    ]

    def ours(x: torch.Tensor, gate: torch.Tensor) -> Any:
        return route(router_logits(x, gate), spec, bias, x if few else None)

    def peer(x: torch.Tensor, gate: torch.Tensor) -> object:
        ids, weights = torch_router(x.float() @ gate.T, spec, bias)
        slots, starts, positions = torch_sort(ids, E)
        return weights, starts, positions, x[slots // spec.topk] if few else slots

    name = "gate, route and gather" if few else "gate and route"
    params: dict[str, int | str] = {"tokens": T, "experts": E, "topk": spec.topk, "hidden": H}
    return Case(
        "router",
        name,
        params,
        rotating(ours, inputs),
        nbytes,
        2 * T * E * H,
        {"torch": rotating(peer, inputs)},
        sets,
        error=lambda: truth.route_error(
            ours(*inputs[0]), logits_of(*inputs[0]), spec, bias, inputs[0][0]
        ),
    )


def router_case(T: int, E: int, spec: RouterSpec, device: torch.device) -> Case:
    """The choice alone."""
    bias, n = torch.randn(E, device=device) / 4, T * spec.topk
    logits = [(x,) for x in _logits(T, E, 8, device)]
    out = router(logits[0][0], spec, bias)
    return Case(
        "router",
        "router",
        _params(T, E, spec),
        rotating(lambda x: router(x, spec, bias, out=out), logits),
        4 * (T * E + E) + 12 * n,
        0,
        {"torch": rotating(lambda x: torch_router(x, spec, bias), logits)},
        8,
        error=lambda: truth.router_error(router(*logits[0], spec, bias), *logits[0], spec, bias),
    )


def sort_case(T: int, E: int, spec: RouterSpec, device: torch.device) -> Case:
    """The sort alone."""
    n = T * spec.topk
    ids = [(router(x, spec).ids,) for x in _logits(T, E, 8, device)]
    order = sort_pairs(ids[0][0], E)
    return Case(
        "router",
        "sort",
        _params(T, E, spec),
        rotating(lambda i: sort_pairs(i, E, order), ids),
        16 * n + 4 * (E + 1),
        0,
        {"torch": rotating(lambda i: torch_sort(i, E), ids)},
        8,
        error=lambda: truth.sort_error(sort_pairs(*ids[0], E), *ids[0], E),
    )


def rows_case(T: int, E: int, H: int, spec: RouterSpec, back: bool, device: torch.device) -> Case:
    """The rows' gather, or ``back`` their weighted sum."""
    n = T * spec.topk
    routing = router(_logits(T, E, 1, device)[0], spec)
    order, weights = sort_pairs(routing.ids, E), routing.weights
    x = torch.randn(T, H, device=device, dtype=torch.bfloat16)
    y, total = permute(x, order), torch.empty_like(x)
    slots, positions = order.pairs.long(), order.positions.long()
    params = {**_params(T, E, spec), "hidden": H}
    if back:
        return Case(
            "router",
            "unpermute",
            params,
            lambda: unpermute(y, order, weights, None, total),
            2 * (T + n) * H + 8 * n,
            2 * n * H,
            {"torch": lambda: (y[positions] * weights.unsqueeze(-1)).sum(1)},
            error=lambda: relative_error(
                unpermute(y, order, weights), unpermuted(y, order, weights)
            ),
        )
    return Case(
        "router",
        "permute",
        params,
        lambda: permute(x, order, y),
        2 * (T + n) * H + 4 * n,
        0,
        {"torch": lambda: x[slots // spec.topk]},
        error=lambda: relative_error(permute(x, order), permuted(x, order)),
    )


def _params(T: int, E: int, spec: RouterSpec) -> dict[str, int | str]:
    return {"tokens": T, "experts": E, "topk": spec.topk}


def cases(device: torch.device, quick: bool = False) -> Iterator[Case]:
    """The table's rows."""
    return (entry.case(device) for entry in table(quick))


def table(quick: bool = False) -> Iterator[Entry]:
    """One token to a prompt; the parts of a prompt's routing one by one."""
    E, H = 256, 7168
    for T in (1, 8192) if quick else (1, 8, 64, 512, 8192):
        yield _entry("route", route_case, T, E, H, V3, True, False)
    for T in (1,) if quick else (1, 8, 512):
        yield _entry("route-gather", route_case, T, E, H, V3, True, True)
    for T in (1, 8192) if quick else (1, 8, 64, 512, 8192):
        for dtype, name in ((torch.float32, "gate-float32"), (torch.bfloat16, "gate-bfloat16")):
            yield _entry(name, gate_case, T, E, H, dtype)
    for T in (1, 8192):
        yield _entry("step", step_case, T, E, H, V3)
    yield _entry("router", router_case, 8192, E, V3)
    for T in (8192,) if quick else (64, 512, 8192):
        yield _entry("sort", sort_case, T, E, V3)
    for name, back in (("permute", False), ("unpermute", True)):
        yield _entry(name, rows_case, 8192, E, H, V3, back)
    if not quick:
        yield _entry("route-gather", route_case, 1, 160, 5120, V2, False, True)
        for T in (1, 8192):
            plain = RouterSpec(8)
            yield _entry("route", route_case, T, 128, 2048, plain, False, T == 1)


def _entry(name: str, make: Callable[..., Case], T: int, E: int, *given: Any) -> Entry:
    return Entry("router", f"{name}-T{T}-E{E}", functools.partial(make, T, E, *given))


def case(
    device: torch.device,
    tokens: int = 1,
    experts: int = 256,
    topk: int = 8,
    hidden: int = 7168,
    kind: str = "v3",
) -> Case:
    """One case of the command line: router and sort, up to 512 tokens the rows' gather too."""
    spec = router_of(kind, topk, experts)
    return route_case(
        tokens, experts, hidden, spec, spec.scoring == "sigmoid", tokens <= 512, device
    )
