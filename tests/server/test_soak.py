"""`python -m bench.serving.soak`, on a server that is there."""

from __future__ import annotations

import asyncio

from bench.serving.soak.crowd import outcomes_of
from bench.serving.soak.fuzz import statuses_of

from .conftest import Running, Script


def test_a_crowd_is_answered_whole_or_refused(scripted: Script) -> None:
    server = scripted(["w", *["0123456789" * 20] * 900], max_num_seqs=2, max_waiting=1)
    outcomes, memory = asyncio.run(outcomes_of(server.url, 8, 0.5, 1, lambda: 1.0))
    assert outcomes.keys() == {"whole", "429"}
    assert memory[0] == 1.0


def test_what_makes_no_sense_is_refused(served: Running) -> None:
    statuses = asyncio.run(statuses_of(served.url, 100, 1))
    assert sum(statuses.values()) == 100
    assert statuses.keys() <= {200, 400, 404}
    assert served.idle()
