"""Rows of the table of GPU ops (see ``ops.py``): what brings rows of tokens to other GPUs."""

from __future__ import annotations

import torch

from pykernels.gpu.cache_write import cache_write
from pykernels.gpu.copy_filled import copy_filled
from pykernels.gpu.moe.pairs import sum_pairs, take_pairs
from pykernels.ref.pairs import Taken

from .ops import BF16, FP32, Op, Tensors, empty, integers, normal
from .ops_step import INT32, slots_of


def _cache_write() -> Op:
    T, widths = 5, {"k": (BF16, 96), "v": (torch.uint8, 21), "scale": (FP32, 3)}

    def make(device: torch.device) -> Tensors:
        made = {"slot_mapping": slots_of(device, T, 48)}
        for name, (kind, width) in widths.items():
            made[name] = integers(device, 99, T, width, dtype=torch.int64).to(kind)
            made[f"{name}_cache"] = empty(device, 3, 16, width, dtype=kind)
        return made

    def run(t: Tensors) -> None:
        rows, cache = ([t[name + end] for name in widths] for end in ("", "_cache"))
        cache_write(rows, cache, t["slot_mapping"])

    return Op("cache_write", make, run, tuple(f"{name}_cache" for name in widths))


def _take_pairs() -> Op:
    T, H, topk, room = 7, 600, 4, 30

    def make(device: torch.device) -> Tensors:
        order = torch.randperm(T * topk, device=device).to(INT32)
        return {
            "x": normal(device, T, H),
            "ids": integers(device, 9, T, topk, dtype=INT32) - 1,
            "weights": torch.rand(T, topk, device=device),
            "places": order.view(T, topk),
            "rows": empty(device, room, H),
            "taken": empty(device, room, 1, dtype=INT32),
            "factors": empty(device, room, 1, dtype=FP32),
        }

    def run(t: Tensors) -> None:
        *given, rows, ids, factors = t.values()
        take_pairs(*given, (2, 6), room, Taken(rows, ids, factors))

    return Op("take_pairs", make, run, ("rows", "taken", "factors"))


def _sum_pairs() -> Op:
    T, H, topk, room = 7, 600, 4, 30

    def make(device: torch.device) -> Tensors:
        return {
            "first": normal(device, room, H),
            "last": normal(device, room, H),
            "ids": integers(device, 9, T, topk, dtype=INT32) - 1,
            "places": integers(device, room, T, topk, dtype=INT32),
            "out": empty(device, T, H),
        }

    def run(t: Tensors) -> None:
        sum_pairs([t["first"], t["last"]], t["ids"], t["places"], (0, 3, 8), t["out"])

    return Op("sum_pairs", make, run, ("out",))


def _copy_filled() -> Op:
    def make(device: torch.device) -> Tensors:
        count = torch.full((1,), 5, dtype=INT32, device=device)
        return {"x": normal(device, 9, 700), "to": empty(device, 9, 700), "count": count}

    def run(t: Tensors) -> None:
        copy_filled(t["x"], t["to"], t["count"])

    return Op("copy_filled", make, run, ("to",))


RANKS = tuple(make() for make in (_cache_write, _copy_filled, _take_pairs, _sum_pairs))
