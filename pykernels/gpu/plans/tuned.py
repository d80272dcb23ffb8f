"""Tuned plans: the file ``<cache folder>/gpu-plans.json``, read once a process.

A list of lines {"device": the GPU's name, "op", "path", ..., "plan": {...}}. Between them stands
what the plan is for: of products "rows", "N" and "K", of attention the fields of its shape.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...env import Env, env
from ...errors import PykernelsError
from . import attention_lines as attention
from .attention import DecodePlan, PrefillPlan
from .attention_shape import AttentionShape
from .gemm import (
    DequantPlan,
    GemmPlan,
    GemvInt8Plan,
    GemvMmaPlan,
    SkinnyExpertsPlan,
    SkinnyPlan,
    plan_from,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LINEAR_PLANS: dict[
    str, type[GemvInt8Plan | GemvMmaPlan | SkinnyPlan | DequantPlan | SkinnyExpertsPlan]
] = {
    "gemv": GemvInt8Plan,
    "gemv_mma": GemvMmaPlan,
    "skinny": SkinnyPlan,
    "skinny_k_quants": SkinnyExpertsPlan,
    "dequant": DequantPlan,
}
"""By the op of tuned lines."""
EXPERTS_PLANS = {"skinny_gate_up": SkinnyExpertsPlan, "skinny_down": SkinnyExpertsPlan}
"""The same; those of ``_GEMM_OPS`` hold a GemmPlan or, of experts, a DequantPlan."""
_NAME = "gpu-plans.json"
_OLD_NAMES = {"warps": "num_warps", "stages": "num_stages"}
"""Fields of plans as older versions wrote them."""
_GEMM_OPS = ("gate_up", "down", "linear")
_FACTOR = 1.5
"""A plan is taken for up to this many times more or fewer rows, keys, ... than it was tuned for."""
_MOST = 1 << 63
"""Sizes that must be near stay below it: JSON has whole numbers that no quotient can be made of."""

Key = tuple[object, ...]
"""(op, path, device, what must be equal ...)"""


class _Tuned(NamedTuple):
    """A line: what must be near, the plan, and its fields as they are in the file."""

    near: tuple[float, ...]
    plan: object
    fields: dict[str, Any]


def tuned_plan(
    op: str, path: str, device: str, rows: float, N: int, K: int
) -> dict[str, Any] | None:
    """The fields of a product's plan in the line of this shape with the nearest number of rows."""
    nearest = _nearest(env.text(Env.cache_dir), (op, path, device, N, K), (rows,))
    return None if nearest is None else nearest.fields


def tuned_attention(
    op: str, path: str, device: str, shape: AttentionShape
) -> DecodePlan | PrefillPlan | None:
    """The plan of the line of this shape with the nearest batch, queries and context.

    Args:
        op: one of ``attention_lines.OPS``.
        path: of the cache: "bf16", "fp8", or "unpacked" where E4M3 becomes bf16 before a prefill.
    """
    cut = len(attention.SAME)
    key = (op, path, device, *shape[:cut])
    nearest = _nearest(env.text(Env.cache_dir), key, shape[cut:])
    return nearest.plan if nearest and isinstance(nearest.plan, DecodePlan | PrefillPlan) else None


@functools.lru_cache(4096)
def _nearest(folder: str, key: Key, near: tuple[float, ...]) -> _Tuned | None:
    """The nearest line of the file in ``folder``. Launches of sizes seen before only look it up."""
    best, least = None, _FACTOR
    for line in _index(folder).get(key, ()):
        pairs = list(zip(line.near, near, strict=True))
        away = max(max(a / b, b / a) if b > 0 else float("inf") for a, b in pairs)
        if away < least or (best is None and away == least):
            best, least = line, away
    return best


@functools.cache
def _index(folder: str) -> dict[Key, list[_Tuned]]:
    """Lines by what must be equal. Raises as ``_lines``."""
    index: dict[Key, list[_Tuned]] = {}
    for line in _lines(Env.cache_dir.read(folder) / _NAME):
        same, near = _names(line["op"])
        key = (line["op"], line["path"], line["device"], *(line[name] for name in same))
        numbers = tuple(line[name] for name in near)
        index.setdefault(key, []).append(_Tuned(numbers, _plan(line), line["plan"]))
    return index


def _names(op: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(fields of a line that must be equal, fields that must be near)."""
    if op in attention.OPS:
        return attention.SAME, attention.NEAR
    return ("N", "K"), ("rows",)


def _plan(line: dict[str, Any]) -> object:
    """Raises PykernelsError, TypeError or KeyError for a plan that cannot be of its op."""
    op = line["op"]
    if op in attention.OPS:
        return attention.plan_of(line)
    kinds = {**LINEAR_PLANS, **EXPERTS_PLANS}
    if op not in kinds and op not in _GEMM_OPS:
        raise PykernelsError(f"there is no op {op!r}", "It may be of another version")
    other = DequantPlan if "cols" in line["plan"] else GemmPlan
    plan = plan_from(kinds.get(op, other), line["plan"])
    shared = isinstance(plan, GemmPlan | DequantPlan) and plan.split_k > 1
    dealt_out = isinstance(plan, DequantPlan) and plan.num_ctas > 0
    if op in ("gate_up", "down") and (shared or dealt_out):
        raise PykernelsError("experts' programs share no tile", "Leave split_k and num_ctas out")
    if shared and line["path"] == "bf16":
        raise PykernelsError("only weights to dequantize are split over K", "Leave split_k out")
    return plan


def _lines(file: Path) -> list[dict[str, Any]]:
    """Raises PykernelsError: the file is damaged, or no kernel could be launched by a line."""
    at = ""
    try:
        if not file.exists():
            return []
        lines = json.loads(file.read_text())
        if not isinstance(lines, list):
            raise ValueError("it is no list of plans")
        for i, line in enumerate(lines, 1):
            at = f"plan {i}: "
            at = f"plan {i}, of {line['op']}: "
            if not all(isinstance(line.get(name, ""), str) for name in ("op", "device", "path")):
                raise ValueError("op, device and path must be text")
            same, near = _names(line["op"])
            if missing := {"device", "path", *same, *near} - line.keys():
                raise ValueError(f"what it is for is not said: {', '.join(sorted(missing))}")
            if not all(isinstance(line[name], int | float) for name in (*same, *near)):
                raise ValueError(f"{', '.join((*same, *near))} must be numbers")
            if not all(0 < line[name] < _MOST for name in near):
                raise ValueError(f"{' and '.join(near)} must be above 0 and below 2 ** 63")
            line["plan"] = {_OLD_NAMES.get(k, k): v for k, v in line["plan"].items()}
            _plan(line)
        return list(lines)
    except (
        PykernelsError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OSError,
        RecursionError,
    ) as error:
        if isinstance(error, OSError):
            raise PykernelsError(
                f"{file} cannot be read: {error.strerror}",
                "Point PYKERNELS_CACHE_DIR at a folder that you may read",
            ) from None
        why = f"there is no {error}" if isinstance(error, KeyError) else error
        raise PykernelsError(
            f"{file} cannot be read: {at}{why}",
            "Delete it, or run python -m bench.tune again",
        ) from None


def write_tuned(device: str, op: str, path: str, plan: DataclassInstance, **shape: float) -> Path:
    """Puts a tuned plan into the file, in the place of an older one; returns the file's path.

    Args:
        shape: what it is for: the fields that a line of the op has.

    Raises:
        PykernelsError: the file cannot be written, or the one that is there cannot be read.
    """
    key = {"device": device, "op": op, "path": path, **shape}
    file = env.cache_dir / _NAME  # read again: another process may have written since
    kept = [line for line in _lines(file) if any(line.get(k) != key[k] for k in key)]
    whole = file.with_name(f"{file.name}.{os.getpid()}.new")  # another process may write, too
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        whole.write_text(json.dumps([*kept, {**key, "plan": asdict(plan)}], indent=1) + "\n")
        whole.replace(file)
    except OSError as error:
        raise PykernelsError(
            f"{file} cannot be written: {error.strerror}",
            "Point PYKERNELS_CACHE_DIR at a folder that you may write to",
        ) from None
    _index.cache_clear()
    _nearest.cache_clear()
    return file
