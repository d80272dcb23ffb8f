"""Tuned plans: the file ``<cache folder>/gpu-plans.json``.

A list of lines {"device": the GPU's name, "op", "path", "rows", "N", "K", "plan": {...}}.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..env import env
from ..errors import PykernelsError
from .plan_types import ExpertsPlan, FewPlan, GemmPlan, GemvPlan, ManyPlan, OneRowPlan

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LINEAR_PLANS: dict[str, type[GemvPlan | OneRowPlan | FewPlan | ManyPlan | ExpertsPlan]] = {
    "gemv": GemvPlan,
    "one": OneRowPlan,
    "few": FewPlan,
    "few_k": ExpertsPlan,
    "many": ManyPlan,
}
"""By the op of tuned lines."""
EXPERTS_PLANS = {"few_gate_up": ExpertsPlan, "few_down": ExpertsPlan}
"""The same; all others hold a GemmPlan or, of experts, a ManyPlan."""


def _file() -> Path:
    return env.cache_dir / "gpu-plans.json"


def tuned_plan(
    op: str, path: str, device: str, rows: float, N: int, K: int
) -> dict[str, Any] | None:
    """The plan's fields in the line of this shape with the nearest number of rows, up to 1.5 times
    more or fewer."""
    same = [
        line
        for line in _file_lines(str(_file()))
        if (line["op"], line["path"], line["device"]) == (op, path, device)
        and (line["N"], line["K"]) == (N, K)
    ]
    away = {i: max(line["rows"] / rows, rows / line["rows"]) for i, line in enumerate(same) if rows}
    nearest = min(away, key=away.__getitem__, default=None)
    return None if nearest is None or away[nearest] > 1.5 else same[nearest]["plan"]


@functools.cache
def _file_lines(path: str) -> tuple[dict[str, Any], ...]:
    """Read once a process. Raises PykernelsError: the file is damaged."""
    file = Path(path)
    if not file.exists():
        return ()
    try:
        lines = json.loads(file.read_text())
        for line in lines:
            kinds = {**LINEAR_PLANS, **EXPERTS_PLANS}
            other = ManyPlan if "cols" in line["plan"] else GemmPlan
            kinds.get(line["op"], other)(**line["plan"])
            if not line["rows"] > 0 or {"device", "path", "N", "K"} - line.keys():
                raise ValueError(f"what the plan of {line['op']} is for is not said")
        return tuple(lines)
    except (PykernelsError, ValueError, KeyError, TypeError, OSError) as error:
        raise PykernelsError(
            f"{file} cannot be read: {error}", "Delete it, or run python -m bench.gpu.tune again"
        ) from None


def write_tuned(
    device: str, op: str, path: str, rows: float, N: int, K: int, plan: DataclassInstance
) -> Path:
    """Puts a tuned plan into the file, in the place of an older one; returns the file's path.

    Raises:
        PykernelsError: the file cannot be written, or the one that is there cannot be read.
    """
    _file_lines.cache_clear()  # another process may have written since
    key = {"device": device, "op": op, "path": path, "rows": rows, "N": N, "K": K}
    kept = [line for line in _file_lines(str(_file())) if any(line[k] != key[k] for k in key)]
    file = _file()
    whole = file.with_suffix(".new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        whole.write_text(json.dumps([*kept, {**key, "plan": asdict(plan)}], indent=1) + "\n")
        whole.replace(file)
    except OSError as error:
        raise PykernelsError(
            f"{file} cannot be written: {error.strerror}",
            "Point PYKERNELS_CACHE_DIR at a folder that you may write to",
        ) from None
    _file_lines.cache_clear()
    return file
