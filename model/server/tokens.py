"""`/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field, model_validator

from .http.errors import bad_request
from .openai.chat_schema import check_continued
from .openai.messages import Message, Tool, plain
from .serving.fields import Body, Count
from .serving.served import Served


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages")
        check_continued(self.add_generation_prompt, self.continue_final_message)
        return self


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[Count], Field(max_length=1 << 20)]


def token_routes(served: Served) -> APIRouter:
    router = APIRouter(tags=["tokens"])

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        served.check_name(body.model)
        ids = await served.prepared(_ids, served, body)
        body_: dict[str, Any] = {
            "tokens": ids,
            "count": len(ids),
            "max_model_len": served.facts.longest,
        }
        if body.return_token_strs:
            body_["token_strs"] = served.tokenizer.convert_ids_to_tokens(ids)
        return body_

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        served.check_name(body.model)
        vocab = served.facts.vocab_size
        if max(body.tokens, default=0) >= vocab:
            raise bad_request(f"tokens: ids are below {vocab}.", "tokens")
        decode = served.tokenizer.decode
        text = await served.prepared(decode, body.tokens, clean_up_tokenization_spaces=False)
        return {"prompt": text}

    return router


def _ids(served: Served, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        tools = [tool.plain() for tool in body.tools or ()]
        prompts = served.prompts
        return prompts.chat(
            plain(body.messages),
            tools,
            body.chat_template_kwargs,
            prefilled=body.continue_final_message,
            begun=body.add_generation_prompt,
        ).ids
    prompt = body.prompt or ""
    if body.add_special_tokens and prompt:
        return served.prompts.text(prompt).ids
    return served.prompts.bare(prompt).ids
