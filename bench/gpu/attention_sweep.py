"""python -m bench.gpu.attention_sweep [KIND ...]: many launch plans of each kernel, timed.

For whoever writes ``pykernels/gpu/attention_plan.py``: every row is one plan on one size, the best
last. A plan that does not compile or does not fit is a row with its reason.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Iterator
from dataclasses import astuple, fields
from statistics import median
from typing import Any

from pykernels.errors import PykernelsError
from pykernels.gpu.attention_plan import DecodePlan, PrefillPlan

from .attention import KINDS, Size, build
from .harness import rates, reason
from .machine import check_gpu
from .roofs import measure_roofs
from .timer import make_timer


def mla_decode_plans(size: Size) -> Iterator[DecodePlan]:
    if size.heads <= 16:
        for keys, stages, per_sm in itertools.product((32, 64), (2, 3), (1, 2)):
            yield DecodePlan(16, keys, 8, stages, per_sm)
    for per_sm, least in itertools.product((1, 2), (1, 3)):  # 2 an SM: two waves
        yield DecodePlan(64, 64, 8, 1, per_sm, by_hand=True, least=least)
    for across in (True, False):
        for keys, stages in ((64, 2), (32, 3), (32, 4)):
            yield DecodePlan(64, keys, 8, stages, 1, across)


def gqa_decode_plans(size: Size) -> Iterator[DecodePlan]:
    tile = 16 if size.heads // size.kv_heads <= 16 else 64
    if size.format == "fp8" and tile == 16:
        rows = 8 if size.heads // size.kv_heads <= 8 else 16
        for (keys, warps), per_sm in itertools.product(((64, 4), (128, 4), (128, 8)), (1, 2, 3)):
            yield DecodePlan(rows, keys, warps, 1, per_sm, in_lanes=True)
    for keys, stages, warps in itertools.product((64, 128), (2, 3, 4), (4, 8)):
        if keys * (stages - 1) <= 256:
            for per_sm in (1, 2):
                yield DecodePlan(tile, keys, warps, stages, per_sm)


def prefill_plans(size: Size) -> Iterator[PrefillPlan]:
    for keys in (64, 128):
        yield PrefillPlan(128, keys, 8, 1, by_hand=True)
    for (rows, warps), keys, stages in itertools.product(((128, 8), (64, 4)), (64, 128), (2, 3)):
        yield PrefillPlan(rows, keys, warps, stages)


SWEEPS = (
    (Size("mla_decode", 1, 65536), mla_decode_plans),
    (Size("mla_decode", 8, 8192), mla_decode_plans),
    (Size("mla_decode", 8, 32768, format="fp8"), mla_decode_plans),
    (Size("mla_decode", 8, 32768, heads=16), mla_decode_plans),
    (Size("gqa_decode", 1, 32768, heads=32), gqa_decode_plans),
    (Size("gqa_decode", 8, 32768, heads=32), gqa_decode_plans),
    (Size("gqa_decode", 8, 32768, heads=32, format="fp8"), gqa_decode_plans),
    (Size("gqa_prefill", 1, 8192, heads=32), prefill_plans),
    (Size("gqa_prefill", 1, 8192, heads=16, head_dim=256, kv_heads=4), prefill_plans),
    (Size("mla_prefill", 1, 8192, heads=32), prefill_plans),
)


def main(kinds: list[str]) -> None:
    """Every plan of the kinds named, or of all.

    Raises:
        PykernelsError: there is no such kind, or no GPU.
    """
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise PykernelsError(f"no attention {unknown[0]!r}", f"Use some of {', '.join(KINDS)}")
    device = check_gpu("cuda:0")
    roofs, timer = measure_roofs(device), make_timer(device)
    print(roofs)
    for size, plans in SWEEPS:
        if kinds and size.kind not in kinds:
            continue
        print(f"\n{size.kind} {size.params}", flush=True)
        found: list[tuple[float, Any]] = []
        for plan in plans(size):
            label = " ".join(
                f"{f.name}={v}" for f, v in zip(fields(plan), astuple(plan), strict=True)
            )
            try:
                case = build(size, device, plan, peers=False)
                ready = timer.prepare(case.run, case.sets, 0.02)
                us = median(1e6 * ready() for _ in range(ready.rounds))
                row = rates(case, us, roofs)
                found.append((us, label))
                print(
                    f"{us:9.1f} us  {row['gbps']:7.0f} GB/s  {row['tflops']:6.1f} TFLOP/s"
                    f"  {row['roof_share']:.3f} of the roof  {label}",
                    flush=True,
                )
            except Exception as error:
                print(f"     none  {label}: {reason(error)[:120]}", flush=True)
                timer.check()
            case = ready = None  # type: ignore[assignment]
            gc.collect()
        for us, label in sorted(found)[:3]:
            print(f"best {us:9.1f} us  {label}", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except PykernelsError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
