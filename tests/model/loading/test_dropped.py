"""A model that is loaded, used and dropped, as in a notebook's next `llm = load_engine(...)`."""

from __future__ import annotations

import threading
import time
import weakref
from pathlib import Path

import pytest

import model

from .. import tiny


@pytest.mark.parametrize("device", ["cpu", "ref"])
def test_a_model_that_nobody_has_is_freed(device: str, tmp_path: Path) -> None:
    """Weights, cache and threads, without ``close`` and before the garbage collector comes."""
    tiny.make(tmp_path, "qwen3_moe")
    before = set(threading.enumerate())
    llm = model.load_engine(tmp_path, max_model_len=64, device=device, kernel="generic")
    assert llm.generate([5, 6, 7], max_tokens=2).token_ids
    assert list(llm.stream([5, 6, 7], max_tokens=2))
    held = [weakref.ref(each) for each in (llm, llm.engine, llm.runner, llm.runner.weights)]
    del llm
    limit = time.monotonic() + 5
    while any(each() for each in held) or set(threading.enumerate()) - before:
        assert time.monotonic() < limit, [each() for each in held]
        time.sleep(0.01)
