"""Pages between main memory and the GPU, against torch's own indexing."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from pykernels.errors import PykernelsError
from pykernels.gpu.kv_pages import EDGE, list_pages, load_pages, store_rows

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
    load, store = KV_PAGES[2:]
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
