"""What a tuned line of attention is for, and which plans its op has a kernel for.

Free are the tile, its keys, warps and stages, how many programs share a GPU's processors, and which
kernel it is, where several take these heads. Whether keys in E4M3 are unpacked is not: that is
decided by the bytes it takes, and each way has a path of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...errors import PykernelsError
from .attention import (
    DecodePlan,
    PrefillPlan,
    in_lanes_fits,
    in_ring_fits,
    warp_specialized_fits,
    warp_specialized_prefill_fits,
)
from .gemm import plan_from


class AttentionShape(NamedTuple):
    """What a plan is chosen by. The first fields of a line must be equal, ``NEAR`` nearly.

    Attributes:
        head_dim, rope, value_dim: of MLA's decode the latent, its rotated part, the latent again;
            ``rope`` is 0 where no part is apart.
        page: keys of one, 0 without pages.
        window: 0 for none.
        queries: new tokens of a sequence, at most.
        context: keys of a sequence that there is room for; of a decode with a window at most
            those that are seen, of a prefill without pages the average.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: int
    value_dim: int
    page: int
    window: int
    batch: int
    queries: int
    context: int


NEAR = ("batch", "queries", "context")
SAME = AttentionShape._fields[: -len(NEAR)]

_PATHS: dict[str, tuple[str, ...]] = {
    "mla_decode": ("bf16", "fp8"),
    "gqa_decode": ("bf16", "fp8"),
    "mla_prefill": ("bf16",),
    "gqa_prefill": ("bf16", "fp8", "unpacked"),
}
OPS = tuple(_PATHS)


def plan_of(line: dict[str, Any]) -> DecodePlan | PrefillPlan:
    """The plan of a line of the file.

    Raises:
        PykernelsError: no kernel of its op could be launched by it, on any GPU.
        TypeError, KeyError: a field that is not known, or not there.
    """
    op, path = line["op"], line["path"]
    if path not in _PATHS[op]:
        raise PykernelsError(f"{op} has no path {path!r}", f"Use {', '.join(_PATHS[op])}")
    shape = AttentionShape(**{name: line[name] for name in AttentionShape._fields})
    if op.endswith("decode"):
        plan = plan_from(DecodePlan, line["plan"])
        _check_decode(op, path == "fp8", shape, plan)
        return plan
    prefill = plan_from(PrefillPlan, line["plan"])
    _check_prefill(path, shape, prefill)
    return prefill


def _check_decode(op: str, fp8: bool, shape: AttentionShape, plan: DecodePlan) -> None:
    mla, D, page = op == "mla_decode", shape.head_dim, shape.page
    wrong = {
        "warp_specialized": plan.warp_specialized
        and not (mla and warp_specialized_fits(D, shape.rope, fp8, page)),
        "across": plan.across and not mla,
        "in_lanes": plan.in_lanes and (mla or not in_lanes_fits(D, fp8, page)),
        "in_ring": plan.in_ring and (mla or not in_ring_fits(D, fp8, page)),
    }
    _refuse(op, wrong)


def _check_prefill(path: str, shape: AttentionShape, plan: PrefillPlan) -> None:
    page = shape.page if path == "bf16" else 0
    fits = warp_specialized_prefill_fits(
        shape.head_dim, shape.value_dim, shape.rope, page, plan.keys
    )
    wrong = {
        "warp_specialized": plan.warp_specialized and (path == "fp8" or not fits),
        "unpack": plan.unpack != (path == "unpacked"),
    }
    _refuse(f"a prefill of path {path!r}", wrong)


def _refuse(what: str, wrong: dict[str, bool]) -> None:
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise PykernelsError(
                f"no kernel of {what} takes these heads by a plan with this {name}",
                f"Leave {name} out" if name != "unpack" else "The path says whether to unpack",
            )
