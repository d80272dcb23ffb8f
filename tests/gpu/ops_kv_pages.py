"""Rows of the table of GPU ops (see ``ops.py``): pages that come from main memory, and go back.
Here all of it is the GPU's own."""

from __future__ import annotations

import torch

from pykernels.gpu.kv_pages import list_pages, load_pages, store_rows
from pykernels.gpu.page_blocks import PageBlocks

from .ops import FP32, Op, Tensors, empty, integers, normal

INT32 = torch.int32
_P, _PAGE, _KVH, _D = 7, 16, 2, 96


def _cache(device: torch.device) -> Tensors:
    scales = torch.rand(_P, _PAGE, _KVH, device=device)
    return {"k": normal(device, _P, _PAGE, _KVH, _D), "k_scale": scales}


def _staging(device: torch.device) -> Tensors:
    k = empty(device, _P, _PAGE, _KVH, _D)
    return {"to_k": k, "to_k_scale": empty(device, _P, _PAGE, _KVH, dtype=FP32)}


def _list(window: int) -> Op:
    def make(device: torch.device) -> Tensors:
        lengths = torch.tensor([40, 0, 17], dtype=INT32, device=device)
        table = integers(device, _P, 3, 4, dtype=INT32)
        return {"table": table, "lengths": lengths, "out": empty(device, _P + 1, dtype=INT32)}

    def run(t: Tensors) -> None:
        list_pages(t["table"], t["lengths"], t["out"], _PAGE, window)

    return Op(f"list_pages, window {window}", make, run)


def _load() -> Op:
    def make(device: torch.device) -> Tensors:
        pages = torch.tensor([3, 1, 4, 6, 9, 9, 9, 9], dtype=INT32, device=device)
        return {"pages": pages, **_cache(device), **_staging(device)}

    def run(t: Tensors) -> None:
        load_pages(t["pages"], [t["k"], t["k_scale"]], [t["to_k"], t["to_k_scale"]])

    return Op("load_pages", make, run, ("to_k", "to_k_scale"))


def _store() -> Op:
    def make(device: torch.device) -> Tensors:
        slots = torch.tensor([20, -1, 3, 111], dtype=INT32, device=device)
        return {"slots": slots, **_cache(device), **_staging(device)}

    def run(t: Tensors) -> None:
        store_rows(t["slots"], [t["k"], t["k_scale"]], [t["to_k"], t["to_k_scale"]])

    return Op("store_rows", make, run, ("to_k", "to_k_scale"))


def _cross() -> Op:
    def make(device: torch.device) -> Tensors:
        return _cache(device)

    def run(t: Tensors) -> None:
        blocks = PageBlocks([x.flatten(1).view(torch.uint8) for x in t.values()])
        blocks.gather(2)
        blocks.scatter(4)

    return Op("page_blocks", make, run, ("k", "k_scale"))


KV_PAGES = (_list(0), _list(20), _load(), _store(), _cross())
