"""The routers that ``--kind`` names, apart from the GPU's kernels that some of them time."""

from __future__ import annotations

from collections.abc import Callable

from pykernels.errors import PykernelsError
from pykernels.shapes import RouterSpec

KINDS: dict[str, Callable[[int], RouterSpec]] = {
    "v3": lambda topk: RouterSpec(topk, "sigmoid", True, 8, 4, "top2", 2.5),
    "v2": lambda topk: RouterSpec(topk, "softmax", False, 8, 3),
    "softmax": RouterSpec,
    "sigmoid": lambda topk: RouterSpec(topk, "sigmoid"),
}


def router_of(kind: str, topk: int, experts: int) -> RouterSpec:
    """Returns the router that ``--kind`` names.

    Raises:
        PykernelsError: there is no such kind, or none of so many experts.
    """
    if kind not in KINDS:
        raise PykernelsError(f"There is no router {kind!r}", f"Use one of {', '.join(KINDS)}")
    spec = KINDS[kind](topk)
    spec.check(experts)
    return spec
