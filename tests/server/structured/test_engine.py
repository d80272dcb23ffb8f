"""The embedded model, which knows Python and no JSON, writes what the schema says."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

import model
from model.server.parsers import parser_for
from model.server.structured import Vocabulary, constraint_for

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kinds": {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "size", "kinds"],
    "additionalProperties": False,
}


def test_outputs_keep_to_their_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYKERNELS_KERNEL", "generic")
    wanted = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    with model.load_engine(model.EMBEDDED, max_num_seqs=4, max_model_len=256) as llm:
        assert llm.tokenizer is not None
        words = Vocabulary(llm.tokenizer, llm.runner.vocab_size, llm.engine.eos_token_ids)
        constraint = constraint_for(words, parser_for("deepseek_v3"), response_format=wanted)

        def outputs(seed: int) -> list[str]:
            params = {"constraint": constraint} if seed else {}
            handle = llm.submit("x = ", seed=seed, n=2, max_tokens=100, **params)
            return [one.text for one in handle.result().completions]

        with ThreadPoolExecutor(4) as threads:
            free, *found = threads.map(outputs, range(4))

    assert not any("kinds" in text for text in free)
    for text in (text for texts in found for text in texts):
        value = json.loads(text)
        assert list(value) == ["name", "size", "kinds"]
        assert 0 <= value["size"] <= 999 and set(value["kinds"]) <= {"x", "y"}
