"""A forked child has none of the parent's threads: it hears so, instead of waiting for them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import model
from pykernels.errors import PykernelsError

from .. import tiny


def in_child(*calls: Callable[[], object]) -> list[str]:
    """What each of the calls raises in a forked child, or returns, in one line."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends it if it hangs
        for call in calls:
            try:
                told = call() or ""
            except PykernelsError as error:
                told = str(error)
            os.write(writing, f"{told}\n".encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        lines = pipe.read().splitlines()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, lines
    return lines


@pytest.mark.parametrize("device", ["cpu", "ref"])
def test_an_engine_serves_its_own_process_only(device: str, tmp_path: Path) -> None:
    tiny.make(tmp_path, "qwen3_moe")
    with model.load_engine(
        tmp_path, max_model_len=64, threads=1, device=device, kernel="generic"
    ) as llm:
        handle = llm.submit([5, 6, 7], temperature=0, max_tokens=8, ignore_eos=True)
        *refused, cancelled, closed = in_child(
            lambda: llm.generate([5, 6, 7], max_tokens=2),
            lambda: next(llm.stream([5, 6, 7], max_tokens=2)),
            lambda: llm.engine.generate([[5, 6, 7]]),
            handle.result,
            handle.cancel,
            llm.close,
        )
        assert all("this engine belongs to the parent process" in line for line in refused)
        assert len(refused) == 4 and cancelled == closed == ""
        assert len(handle.result().token_ids) == 8  # its parent goes on


def test_a_child_loads_a_model_of_its_own(tmp_path: Path) -> None:
    """Behind a parent that has made torch's threads, which large tensors in the child would wait
    for; by the engine, and by transformers' forward on the workers that all its models share."""
    tiny.make(tmp_path, "qwen3_moe")

    def engine() -> str:
        with model.load_engine(tmp_path, max_model_len=64, threads=1, kernel="generic") as llm:
            return str(llm.generate([5, 6, 7], temperature=0, max_tokens=4).token_ids)

    def eager() -> str:
        lm = model.from_pretrained(tmp_path, kernel="generic")
        return str(lm(torch.arange(2, 90)[None].repeat(8, 1)).logits.argmax(-1).sum())

    torch.ones(1 << 20, device="cpu").add_(1)
    with torch.no_grad():
        wanted = [engine(), eager()]
        assert in_child(engine, eager) == wanted


def test_a_child_of_the_eager_path_is_refused_before_torch_waits(tmp_path: Path) -> None:
    """torch's own threads are gone too: an embedding of many tokens would wait for them."""
    tiny.make(tmp_path, "qwen3_moe")
    lm = model.from_pretrained(tmp_path, threads=1, kernel="generic")
    ids = torch.arange(2, 90)[None].repeat(8, 1)
    with torch.no_grad():
        lm(ids)
        (told,) = in_child(lambda: lm(ids))
    assert "this worker pool belongs to the parent process" in told


def test_a_child_that_leaves_by_itself_does_not_hang(tmp_path: Path) -> None:
    """With the handlers of its exit, which would end an engine and its workers."""
    tiny.make(tmp_path, "qwen3_moe")
    with model.load_engine(tmp_path, max_model_len=64, threads=1, kernel="generic") as llm:
        llm.generate([5, 6, 7], max_tokens=2)
        assert in_child(llm.engine.close, llm.pool.close) == ["", ""]  # what atexit calls
