"""Pages between main memory and the GPU, against torch's own indexing."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from pykernels.errors import PykernelsError
from pykernels.gpu.kv_pages import EDGE, list_pages, load_pages, store_rows
from pykernels.gpu.page_blocks import PageBlocks
from runtime.devices.cuda.memory.pages import GpuPages
from runtime.kv_cache.page_store import Kind
from runtime.machine.pinned import Pinned

from .ops import bits
from .ops_kv_pages import KV_PAGES

PAGE = 16
COMPILES = [
    (op.name, partial(lambda op: op.run(op.make(torch.device("meta"))), op)) for op in KV_PAGES
]


@pytest.mark.parametrize("window", [0, 20])
def test_pages_of_all_sequences_are_listed_once(window: int, device: torch.device) -> None:
    table = torch.randperm(300)[:210].view(3, 70).to(torch.int32)
    table[2, :40] = table[0, :40]  # they begin alike
    lengths = torch.tensor([1100, 0, 17], dtype=torch.int32)
    out = torch.full((301,), -1, dtype=torch.int32, device=device)
    list_pages(table.to(device), lengths.to(device), out, PAGE, window)
    wanted = {
        int(table[s, position // PAGE])
        for s, length in enumerate(lengths.tolist())
        for position in range(max(0, length - (window or length)) // EDGE * EDGE, length)
    }
    assert len(wanted) == (7 if window else 69)
    assert out[1 : 1 + int(out[0])].tolist() == sorted(wanted)


def test_listed_pages_come_and_written_rows_go_back(device: torch.device) -> None:
    load, store = KV_PAGES[2:4]
    given = load.make(device)
    before = {name: x.clone() for name, x in given.items()}
    load.run(given)
    for name in ("k", "k_scale"):
        wanted = before[f"to_{name}"].clone()
        wanted[[1, 4, 6]] = given[name][[1, 4, 6]]
        assert torch.equal(bits(given[f"to_{name}"]), bits(wanted))
    given = store.make(device)
    before = {name: x.clone() for name, x in given.items()}
    store.run(given)
    for name in ("k", "k_scale"):
        wanted = before[f"to_{name}"].clone()
        rows, source = wanted.flatten(0, 1), given[name].flatten(0, 1)
        rows[[20, 3, 111]] = source[[20, 3, 111]]
        assert torch.equal(bits(given[f"to_{name}"]), bits(wanted))


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    given = KV_PAGES[2].make(device)
    with pytest.raises(PykernelsError, match="pages of"):
        load_pages(given["pages"], [given["k"]], [given["to_k_scale"]])
    with pytest.raises(PykernelsError, match="Give room for all"):
        load_pages(given["pages"][:3], [given["k"]], [given["to_k"]])
    with pytest.raises(PykernelsError, match="contiguous ones"):
        store_rows(given["pages"], [given["k"]], [given["to_k"][:3]])
    with pytest.raises(PykernelsError, match="lengths of 2 sequences"):
        list_pages(given["pages"].view(2, 4), given["pages"][:3], given["pages"], PAGE)


def test_a_page_of_all_layers_crosses_as_one_block(device: torch.device) -> None:
    """Of unlike parts, one of which takes several programs of the kernel; and a state."""
    shapes = {"k": (5, 16, 2, 96), "scale": (5, 16, 2), "v": (5, 16, 1100), "state": (3, 7)}
    caches = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
    was = {name: cache.cpu().clone() for name, cache in caches.items()}
    written = list[int]()
    pages = GpuPages(caches, {"state"}, Pinned(), written.append)
    assert all(torch.equal(cache.cpu(), was[name]) for name, cache in caches.items())
    for kind, names in ((Kind.PAGE, ("k", "scale", "v")), (Kind.STATE, ("state",))):
        block = pages.host(pages.nbytes(kind))
        pages.read(kind, 2, block)
        assert block.tobytes() == b"".join(was[name][2].numpy().tobytes() for name in names)
        block[:] = np.roll(block, 4)
        pages.write(kind, 1, block)
        wanted = was | {name: was[name].clone() for name in names}
        at = 0
        for name in names:
            part = wanted[name][1].numpy().view(np.uint8).reshape(-1)
            part[:] = block[at : at + part.size]
            at += part.size
        was = wanted
        for name, cache in caches.items():
            assert torch.equal(bits(cache.cpu()), bits(was[name]))
    assert written == [1]


def test_pages_of_odd_bytes_are_refused(device: torch.device) -> None:
    with pytest.raises(PykernelsError, match="6 bytes"):
        PageBlocks([torch.zeros(2, 6, dtype=torch.uint8, device=device)])
