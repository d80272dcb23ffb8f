"""What the schemas of all APIs share: strict models, texts in parts, settings of sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from runtime.runner.sampling_params import MAX_LOGPROBS

MOST = 1 << 31
"""The limit of whole numbers that count something."""


class Strict(BaseModel):
    """An unknown field is an error, unless it is null, which says nothing: clients' libraries send
    what they know with all its fields. A value of another type is an error.

    Attributes:
        ignored: fields that clients send and that change nothing here.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _without_ignored(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {
            name: value
            for name, value in data.items()
            if name not in cls.ignored and (value is not None or name in known)
        }


class Body(Strict):
    """The body of a request: all its texts can be written as UTF-8, whoever reads them later."""

    @model_validator(mode="before")
    @classmethod
    def _no_half_characters(cls, data: Any) -> Any:
        left = [("", data)]
        while left:
            path, value = left.pop()
            if isinstance(value, dict):
                names = [(path, name) for name in value]
                left += names + [(f"{path}.{name}", one) for name, one in value.items()]
            elif isinstance(value, list):
                left += [(f"{path}[{i}]", one) for i, one in enumerate(value)]
            elif isinstance(value, str) and not _is_unicode(value):
                where = path.removeprefix(".") or "the body"
                raise ValueError(f"{where} holds half of a surrogate pair, which is no character")
        return data


def _is_unicode(text: str) -> bool:
    """JSON can escape one half of a surrogate pair, and nothing else can hold it."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def joined(content: Any, kinds: Sequence[str] = ("text", "input_text", "output_text")) -> Any:
    """A text that is given in parts, as one; anything else stays, for pydantic to judge.

    Raises:
        ValueError: a part that is no text.
    """
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise ValueError(f"this model reads text only, no part of type {kind!r}"[:200])
        if not isinstance(part.get("text"), str):
            raise ValueError("a part has no text")
        texts.append(part["text"])
    return "\n".join(texts)


_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Text = Annotated[
    str,
    BeforeValidator(joined),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}),
]
"""A text, or its parts."""

Count = Annotated[int, Field(ge=0, le=MOST)]


Bias = Annotated[float, Field(ge=-100, le=100)]
ToolName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
"""A function's name as OpenAI allows it."""
Stop = Annotated[str, Field(max_length=256)]
"""Looked for in the engine's thread, at each token."""


class Sampling(Body):
    """Settings of sampling as OpenAI names them, and those of vLLM and llama.cpp beside them.

    One that is not given is the checkpoint's, or ``SamplingParams``' default.
    """

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MOST)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=4096)] | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=1 << 12)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Count], Field(max_length=4096)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None

    @model_validator(mode="after")
    def _check_bias(self) -> Sampling:
        for token in self.logit_bias or ():
            if not (token.isascii() and token.isdecimal() and len(token) < 10):
                raise ValueError("logit_bias: its keys are token ids")
        return self

    def sampling(self) -> dict[str, Any]:
        """The fields of ``SamplingParams`` that are given."""
        names = Sampling.model_fields
        given = {k: v for name in names if (v := getattr(self, k := name)) is not None}
        if "logit_bias" in given:
            given["logit_bias"] = {int(token): v for token, v in given["logit_bias"].items()}
        if given.get("top_k") == -1:  # all, as vLLM has it
            given["top_k"] = 0
        if "seed" in given:
            given["seed"] %= 1 << 63
        if "stop" in given:
            stops = [given["stop"]] if isinstance(given["stop"], str) else given["stop"]
            given["stop"] = [stop for stop in stops if stop]
        return given


TopLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
