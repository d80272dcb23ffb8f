"""OpenAI's API as its own client sees it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from .conftest import CALL, NAME, PARAMETERS, Running, Script

ASKED: Any = [{"role": "user", "content": "def quicksort(xs):"}]
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}


def test_a_stream_is_the_answer_in_pieces(served: Running) -> None:
    client = served.openai()
    settings: Any = {"model": NAME, "messages": ASKED, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**settings)
    pieces = list(
        client.chat.completions.create(
            **settings, stream=True, stream_options={"include_usage": True}
        )
    )
    text = whole.choices[0].message.content
    assert text
    assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == text
    assert [p.choices[0].finish_reason for p in pieces if p.choices][-1] == "length"
    assert whole.choices[0].finish_reason == "length"
    usage, tokenizer = pieces[-1].usage, served.llm.tokenizer
    assert usage is not None and whole.usage is not None and tokenizer is not None
    prompt = tokenizer("User: def quicksort(xs):\nAssistant:")["input_ids"]
    assert usage.prompt_tokens == whole.usage.prompt_tokens == len(prompt)
    assert usage.completion_tokens == whole.usage.completion_tokens == 24


def test_an_echo_has_the_logprobs_of_what_was_written(served: Running) -> None:
    """As lm-eval asks for loglikelihoods: what a prompt's tokens get is what they got when they
    were drawn."""
    complete = served.openai().completions.create
    prompt = "class Stack:\n    def"
    drawn = complete(model=NAME, prompt=prompt, max_tokens=8, temperature=0, logprobs=2).choices[0]
    text = prompt + drawn.text
    echoed = complete(
        model=NAME, prompt=text, max_tokens=1, temperature=0, logprobs=2, echo=True
    ).choices[0]
    assert drawn.logprobs and echoed.logprobs and echoed.text.startswith(text)
    tokens, logprobs = echoed.logprobs.tokens, echoed.logprobs.token_logprobs
    assert tokens and logprobs and echoed.logprobs.text_offset and drawn.logprobs.token_logprobs
    assert logprobs[0] is None and tokens[0] == "<|bos|>"
    assert "".join(tokens[1:]) == echoed.text
    assert tokens[-9:-1] == drawn.logprobs.tokens
    assert logprobs[-9:-1] == pytest.approx(drawn.logprobs.token_logprobs, abs=0.05)
    offsets = echoed.logprobs.text_offset[1:]
    assert [echoed.text[at:] for at in offsets[:2]] == [echoed.text, echoed.text[len(tokens[1]) :]]


def test_settings_of_sampling(served: Running) -> None:
    complete = served.openai().completions.create
    tokenizer = served.llm.tokenizer
    assert tokenizer is not None
    settings: Any = {"model": NAME, "prompt": ["def a", "def b"], "max_tokens": 8}
    first, again = (complete(**settings, n=2, seed=7) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert [choice.text for choice in again.choices] == texts and len(set(texts)) > 1
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    token = tokenizer(" return", add_special_tokens=False)["input_ids"][0]
    forced = complete(**settings, temperature=0, logit_bias={str(token): 100}).choices[0]
    assert forced.text == " return" * 8
    stopped = complete(**settings, temperature=0, logit_bias={str(token): 100}, stop="rn r")
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (" retu", "stop")
    nothing = complete(**settings | {"max_tokens": 0}, echo=True)
    assert [choice.text for choice in nothing.choices] == ["def a", "def b"]


@pytest.mark.parametrize(
    ("settings", "status", "param"),
    [
        ({"temperature": -1}, 400, "temperature"),
        ({"extra_body": {"temprature": 1}}, 400, "temprature"),
        ({"model": "another"}, 404, "model"),
        ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": ""}]}, 400, "messages[0]"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, 400, None),
        ({"tools": [ADD]}, 400, "tools"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, 400, "prompt"),
        ({"n": 65}, 400, "n"),
        ({"extra_body": {"structured_outputs": {}}}, 400, "structured_outputs"),
        ({"extra_body": {"list[int]": 1}}, 400, "list[int]"),
        ({"extra_body": {"stream": "yes"}}, 400, "stream"),
        ({"tools": [{"type": "function", "function": {}}]}, 400, "tools[0].function.name"),
        ({"tool_choice": {"type": "function"}}, 400, "tool_choice.function"),
        ({"logit_bias": {"999999999": 1}}, 400, "logit_bias"),
        ({"extra_body": {"min_tokens": 3, "max_tokens": 2}}, 400, "min_tokens"),
    ],
)
def test_a_bad_request_is_an_error_that_names_it(
    served: Running, settings: dict[str, Any], status: int, param: str | None
) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        served.openai().chat.completions.create(**{"model": NAME, "messages": ASKED} | settings)
    assert raised.value.status_code == status
    assert raised.value.body["param"] == param  # type: ignore[index,call-overload]
    assert served.idle()


def test_too_many_stops_are_counted(served: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="stop: 17 .* 16"):
        served.openai().completions.create(model=NAME, prompt="x", stop=["x"] * 17)


def test_a_body_is_json_whatever_its_type_says(served: Running) -> None:
    """As `curl -d` of the README sends it."""
    body = b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}'
    with served.http() as http:
        for kind in ("application/x-www-form-urlencoded", "text/plain;charset=UTF-8", ""):
            headers = {"Content-Type": kind} if kind else {}
            answer = http.post("/v1/chat/completions", content=body, headers=headers)
            assert answer.status_code == 200, kind


def test_only_allowed_tools_are_shown(scripted: Script) -> None:
    server = scripted([CALL])
    others: Any = [{"type": "function", "function": {"name": f"other_{i}"}} for i in range(8)]
    named = {"type": "function", "function": {"name": "add"}}
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    create = server.openai().chat.completions.create
    answer = create(model=NAME, messages=ASKED, tools=[*others, ADD], tool_choice=choice)
    assert answer.choices[0].finish_reason == "tool_calls"
    with server.http() as http:
        alone = http.post("/tokenize", json={"messages": ASKED, "tools": [ADD]}).json()["count"]
    assert answer.usage and answer.usage.prompt_tokens == alone


def test_an_answer_goes_on_where_its_beginning_ends(scripted: Script) -> None:
    """The prompt has the tokens that transformers' template gives."""
    server = scripted(["lo.", "lo."])
    tokenizer = server.llm.tokenizer
    assert tokenizer is not None
    messages: Any = [*ASKED, {"role": "assistant", "content": "Hel"}]
    for ours in (
        {"continue_final_message": True, "add_generation_prompt": False},
        {"add_generation_prompt": False},
    ):
        answer = server.openai().chat.completions.create(
            model=NAME, messages=messages, extra_body=ours
        )
        assert answer.choices[0].message.content == "lo."
        text = tokenizer.apply_chat_template(messages, tokenize=False, **ours)
        assert answer.usage and answer.usage.prompt_tokens == len(str(text).encode())


def test_each_chunk_has_the_usage_so_far(scripted: Script) -> None:
    server = scripted(["one two three", "one two three"])
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    settings: Any = {"model": NAME, "stream": True, "stream_options": options}
    chat = list(server.openai().chat.completions.create(**settings, messages=ASKED))
    text = list(server.openai().completions.create(**settings, prompt="x"))
    for pieces in (chat, text):
        counts = [piece.usage.completion_tokens for piece in pieces if piece.usage]
        assert len(counts) == len(pieces) and counts == sorted(counts)
        assert counts[-1] == len("one two three") + 1 and counts[-2] == counts[-1]


def test_fields_that_change_nothing_are_taken(served: Running) -> None:
    answer = served.openai().chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        max_tokens=1,
        user="me",
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
    )
    assert answer.usage and answer.usage.completion_tokens == 1


def test_tokens_models_and_health(served: Running) -> None:
    tokenizer = served.llm.tokenizer
    assert tokenizer is not None
    with served.http() as http:
        found = http.post("/tokenize", json={"prompt": "def f(x):"}).json()
        assert found["tokens"] == tokenizer("def f(x):")["input_ids"]
        text = http.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"]
        assert text == tokenizer.decode(found["tokens"])
        assert [http.get(path).status_code for path in ("/health", "/ready", "/nothing")] == [
            *(200, 200, 404)
        ]
        metrics = http.get("/metrics").text
        assert "pykernels_time_to_first_token_seconds_count" in metrics
        assert 'pykernels_kv_level_blocks_total{level="disk",what="written"}' in metrics
    (one,) = served.openai().models.list().data
    assert one.id == NAME


def test_a_call_comes_as_a_call_and_goes_back_as_one(scripted: Script) -> None:
    """Whole and streamed; the template gets it as the model wrote it, so the prefix is found."""
    told = "<think>Two numbers.</think>" + CALL
    server = scripted([told, told, "Three."])
    create, messages = server.openai().chat.completions.create, list(ASKED)
    answer = create(model=NAME, messages=messages, tools=[ADD]).choices[0]
    assert answer.finish_reason == "tool_calls" and not answer.message.content
    assert answer.message.reasoning_content == "Two numbers."  # type: ignore[attr-defined]
    (call,) = answer.message.tool_calls or ()
    assert call.type == "function" and call.function.name == "add"
    assert json.loads(call.function.arguments) == {"a": 1, "b": [2, "x"]}

    arguments = reasoning = ""
    for piece in create(model=NAME, messages=messages, tools=[ADD], stream=True):
        delta = piece.choices[0].delta
        reasoning += getattr(delta, "reasoning_content", None) or ""
        for part in delta.tool_calls or ():
            arguments += (part.function and part.function.arguments) or ""
    assert (json.loads(arguments), reasoning) == ({"a": 1, "b": [2, "x"]}, "Two numbers.")

    messages += [answer.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    second = create(model=NAME, messages=messages, tools=[ADD])
    assert second.choices[0].message.content == "Three."
    assert second.usage and second.usage.prompt_tokens_details
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) > 100


def test_a_form_is_kept_to(served: Running) -> None:
    """A base model that writes Python is made to write JSON."""
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 99}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    create = served.openai().chat.completions.create
    answer = create(model=NAME, messages=ASKED, response_format=form, seed=1, max_tokens=64)
    value = json.loads(answer.choices[0].message.content or "")
    assert set(value) == {"n", "ok"} and isinstance(value["n"], int)
    digits: Any = {"type": "regex", "regex": "[0-9]{4}"}
    answer = create(model=NAME, messages=ASKED, response_format=digits, seed=1)
    assert len(answer.choices[0].message.content or "") == 4
    broken: Any = {"type": "regex", "regex": "[0-9"}
    with pytest.raises(openai.BadRequestError):
        create(model=NAME, messages=ASKED, response_format=broken)
