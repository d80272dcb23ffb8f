"""A program may serve one model after another: what nobody has any more is freed."""

from __future__ import annotations

import gc
import weakref

import model

from .conftest import running, soon


def test_a_model_that_was_served_is_freed() -> None:
    llm = model.load_engine(model.EMBEDDED, kernel="generic", max_num_seqs=8, threads=1)
    held = weakref.ref(llm.runner)
    with running(llm) as server, server.http() as http:
        asked = {"prompt": "def f(", "max_tokens": 2}
        assert http.post("/v1/completions", json=asked).is_success
    del llm, server

    def freed() -> bool:
        gc.collect()
        return held() is None

    assert soon(freed)
