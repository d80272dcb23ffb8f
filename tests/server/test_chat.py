"""`pykernels chat --url`, and what the README says of fields that change nothing."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from model.server.anthropic import schema as of_messages
from model.server.openai import chat_schema, completions_schema
from model.server.responses import schema as of_responses

from ..model.conftest import Run, failed, run
from .conftest import Script, Scripted

__all__ = ["run"]

README = Path(__file__).resolve().parents[2] / "model/server/README.md"


def test_it_talks_with_a_server(
    scripted: Script, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = scripted(["<think>A greeting.</think>Hello.", "Again."], api_key="secret")
    key = tmp_path / "key"
    key.write_text("secret\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi!\nAnd?\n"))
    talked = run("chat", "--url", server.url, "--api-key-file", key, "--system", "Be brief.")
    assert (talked.code, talked.out) == (0, "Hello.\nAgain.\n"), talked.err
    assert "A greeting." in talked.err and re.search(r"\d+ prompt tokens", talked.err)
    runner = server.llm.runner
    assert isinstance(runner, Scripted)
    prompt = "[system]Be brief.[user]Hi![assistant]Hello.[user]And?[assistant]"
    assert server.llm.engine.stats.prompt_tokens == len("[system]Be brief.[user]Hi![assistant]") + (
        len(prompt)
    )

    monkeypatch.setattr("sys.stdin", io.StringIO("Hi!\n"))
    failed(run("chat", "--url", server.url), "401: The API key is missing")
    failed(run("chat", "--url", server.url, "--device", "cuda:0"), "--device is for a model")
    failed(run("chat", "--url", "http://127.0.0.1:1"), "cannot be reached")


def test_ignored_fields_are_those_of_the_readme() -> None:
    page = README.read_text()
    for name, fields in {
        "chat": chat_schema.IGNORED,
        "completions": completions_schema.IGNORED,
        "responses": of_responses.IGNORED,
        "messages": of_messages.IGNORED,
    }.items():
        row = re.search(rf"^\| {name} \| (.*) \|$", page, re.MULTILINE)
        assert row and set(re.findall(r"`(\w+)`", row[1])) == fields
