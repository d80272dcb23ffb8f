"""Attention's lines of the file of tuned plans: which plans its ops have a kernel for.

A plan is free in its tile, keys, warps and stages, in how many CTAs share an SM, and in which
kernel it is, where several take these heads. Whether keys in E4M3 are unpacked is not: that is
decided by the bytes it takes, and each way has a path of its own.
"""

from __future__ import annotations

from typing import Any

from ...errors import PykernelsError
from .attention import DecodePlan, PrefillPlan, decode_kernel_fits, warp_specialized_prefill_fits
from .attention_shape import NEAR, SAME, AttentionShape
from .gemm import plan_from

__all__ = ["NEAR", "OPS", "SAME", "AttentionShape", "plan_of"]

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
        TypeError, KeyError: a field that is not known, or missing.
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
    wrong = {"split_scores": plan.split_scores and op != "mla_decode"}
    if plan.kernel:
        wrong[plan.kernel] = not decode_kernel_fits(op, plan, shape, fp8)
    _refuse(op, wrong)


def _check_prefill(path: str, shape: AttentionShape, plan: PrefillPlan) -> None:
    page = shape.page if path == "bf16" else 0
    sizes = (shape.head_dim, shape.value_dim, shape.rope)
    fits = warp_specialized_prefill_fits(*sizes, page, plan.keys)
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
