"""`pykernels bench serve` against our server."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from model.cli.app import app

from .conftest import Running, Script


def bench(server: Running, *options: str) -> dict[str, Any]:
    size = "--requests", "6", "--prompt", "24", "--tokens", "5", "--json"
    result = CliRunner().invoke(app, ["bench", "serve", "--url", server.url, *size, *options])
    assert result.exit_code == 0, result.stderr
    row: dict[str, Any] = json.loads(result.stdout)
    return row


def test_every_answer_has_the_tokens_that_were_asked_for(served: Running) -> None:
    row = bench(served, "--clients", "3")
    assert (row["completed"], row["errors"]) == (6, 0)
    assert row["token_ids"] and row["ignore_eos"]
    assert (row["prompt_tokens"], row["output_tokens"]) == (6 * 24, 6 * 5)
    assert bench(served, "--cancel", "1")["cancelled"] == 6
    assert served.idle()


def test_clients_go_away_from_answers_of_few_pieces(scripted: Script) -> None:
    """An emoji is four tokens of bytes and one piece of text."""
    server = scripted(["warm", *["\U0001f600" * 2] * 6])
    assert bench(server, "--cancel", "1", "--seed", "0")["cancelled"] == 6
    assert server.idle()


def test_a_full_server_refuses(scripted: Script) -> None:
    server = scripted(["warm", *["0123456789" * 30] * 6], max_num_seqs=1, max_waiting=0)
    row = bench(server, "--rate", "1e5", "--tokens", "300")
    assert row["refused_429"] >= 1 and row["errors"] == 0
    assert row["completed"] + row["refused_429"] == 6
