"""Which node reads a prompt, and which one writes its answer."""

from __future__ import annotations

from model.server.cluster.policy import (
    Candidate,
    decode_node,
    is_read_elsewhere,
    prefill_node,
)


def test_an_answer_is_written_where_its_prompt_is() -> None:
    has, idle = Candidate("has", held=8, inside=2, seats=8), Candidate("idle", 0, 0, 8)
    assert decode_node([idle, has], pages=10) is has
    assert decode_node([idle, Candidate("has", 8, 7, 8)], pages=10) is idle
    assert decode_node([Candidate("full", 10, 8, 8), idle], pages=10) is idle, "no seat is free"
    assert decode_node([Candidate("a", 0, 3, 8), Candidate("b", 0, 2, 8)], 0).name == "b"


def test_a_prompt_is_read_where_it_is_done_first() -> None:
    fast = Candidate("fast", held=0, inside=0, seats=8, queued=0, rate=1000.0)
    slow = Candidate("slow", held=0, inside=0, seats=8, queued=0, rate=100.0)
    assert prefill_node([slow, fast], tokens=640, page_size=64) is fast
    half = Candidate("half", held=8, inside=0, seats=8, rate=100.0)
    assert prefill_node([half, fast], tokens=640, page_size=64) is fast
    busy = Candidate("busy", held=0, inside=0, seats=8, queued=9000, rate=1000.0)
    assert prefill_node([half, busy], tokens=640, page_size=64) is half
    new = Candidate("new", held=0, inside=0, seats=8)
    assert prefill_node([fast, new], tokens=640, page_size=64) is new, "its rate is to be known"


def test_a_prompt_is_read_elsewhere_if_a_page_is_missing() -> None:
    writer = Candidate("d", held=3, inside=0, seats=8)
    assert is_read_elsewhere(writer, stored=0, pages=4)
    assert not is_read_elsewhere(writer, stored=4, pages=4)
    assert not is_read_elsewhere(writer, stored=0, pages=3)
