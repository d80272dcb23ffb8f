"""What only this server tells: experts beside an answer, recorded steps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from runtime.engine.pace import Speed

from .conftest import NAME, Running, Script

ASKED: Any = [{"role": "user", "content": "def quicksort(xs):"}]
EXPERTS: Any = {"pykernels": {"routed_experts": True}}


def test_experts_come_with_the_stream(served: Running) -> None:
    """Each computed token once, in order, the same as in an answer that is not streamed."""
    create = served.openai().chat.completions.create
    settings: Any = {"model": NAME, "messages": ASKED, "temperature": 0, "max_tokens": 12}
    whole = create(**settings, extra_body=EXPERTS).choices[0]
    stream = create(**settings, stream=True, extra_body=EXPERTS)
    pieces = [p.choices[0].model_extra or {} for p in stream if p.choices]
    told = [piece["pykernels"]["routed_experts"] for piece in pieces if "pykernels" in piece]
    assert len(told) > 6
    positions = [p["start"] + i for p in told for i in range(len(p["tokens"]))]
    assert positions == list(range(told[0]["start"], told[0]["prompt_tokens"] + 11))
    tokens = [token for piece in told for token in piece["tokens"]]
    assert "".join(tokens).startswith("<|bos|>User: def quicksort(xs):\nAssistant:")
    assert (whole.message.content or "").startswith("".join(tokens[told[0]["prompt_tokens"] :]))
    again = (whole.model_extra or {})["pykernels"]["routed_experts"]
    assert again["ids"] == [ids for piece in told for ids in piece["ids"]]
    with served.http() as http:
        layers = http.get("/v1/pykernels").json()["routed_layers"]
    assert [layer["layer"] for layer in layers] == [1, 2, 3, 4, 5]
    for token in again["ids"]:
        assert [len(set(ids)) for ids in token] == [layer["topk"] for layer in layers]
        assert all(0 <= i < 32 for ids in token for i in ids)


def test_steps_are_recorded_while_an_answer_is_written(served: Running) -> None:
    def record() -> Any:
        with served.http() as http:
            return http.post("/v1/pykernels/steps", json={"steps": 2}, timeout=60)

    with ThreadPoolExecutor(1) as pool:
        recorded = pool.submit(record)
        while not recorded.done():
            served.openai().chat.completions.create(model=NAME, messages=ASKED, max_tokens=8)
    found = recorded.result().json()
    assert len(found["steps"]) == 2 and found["usage"]
    assert {lane["kind"] for lane in found["lanes"]} == {"engine", "worker"}
    assert {"moe_ffn routed", "router", "attention"} <= set(found["ops"])
    for lane, op, layer, begin, end, tasks in found["spans"]:
        assert lane < len(found["lanes"]) and op < len(found["ops"]) and tasks > 0
        assert begin <= end and (layer is None or 0 <= layer < 6)
    with served.http() as http:
        none = http.post("/v1/pykernels/steps", json={"seconds": 0.05})
        assert none.status_code == 408 and "no 2 steps" in none.json()["error"]["message"]
    assert record_is_off(served)


def test_figures_grow_with_an_answer(served: Running) -> None:
    """An answer of 12 tokens takes 11 steps without a prompt; each reads the same weights."""
    with served.http() as http:
        before = http.get("/v1/pykernels/figures").raise_for_status().json()
        served.openai().chat.completions.create(
            model=NAME, messages=ASKED, max_tokens=12, extra_body={"ignore_eos": True}
        )
        after = http.get("/v1/pykernels/figures").json()
        (part,) = http.get("/v1/pykernels").json()["parts"]
    assert after["decode_steps"] - before["decode_steps"] == 11
    assert after["decode_seconds"] > before["decode_seconds"]
    assert (after["read_bytes"] - before["read_bytes"]) % 11 == 0 < after["expert_bytes"]
    assert part["device"] == "cpu" and part["layers"] == [0, 1, 2, 3, 4, 5]
    assert part["expert_layers"] == [1, 2, 3, 4, 5]


def record_is_off(served: Running) -> bool:
    """After a request, which ends what waited for steps."""
    served.openai().chat.completions.create(model=NAME, messages=ASKED, max_tokens=4)
    pool = served.llm.runner.pool
    return pool is not None and pool.tracing is None


def test_a_model_without_routers_refuses(scripted: Script) -> None:
    server = scripted(["hello"], api_key="secret")
    with server.http() as http:
        asked = http.post("/v1/chat/completions", json={"messages": ASKED, **EXPERTS})
        said = asked.json()["error"]["message"]
        assert asked.status_code == 400 and "no layer of this model chooses experts" in said


def test_the_page_needs_no_key(scripted: Script) -> None:
    with scripted([], api_key="secret").http() as http:
        http.headers.pop("Authorization")
        assert http.get("/v1/pykernels").status_code == 401
        page = http.get("/")
        assert (
            page.status_code == 200
            and "script-src 'self'" in page.headers["Content-Security-Policy"]
        )
        assert http.get("/page/main.js").headers["Content-Type"].startswith("text/javascript")
        assert http.get("/page/routes.py").status_code == 401


def test_speed_beside_its_prediction(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.llm, "speed", Speed(2, 300, 100.0, 70.0))
    with served.http() as http:
        speed = http.get("/v1/pykernels/figures").json()["speed"]
        metrics = http.get("/metrics").text
    assert speed["predicted"] == 100 and "70.0 tok/s where 100.0 are predicted" in speed["note"]
    label = 'context="300",of="measured",sequences="2"'
    assert f"pykernels_decode_tokens_per_second{{{label}}} 70.0" in metrics
    assert "pykernels_decode_off_prediction 1.0" in metrics
