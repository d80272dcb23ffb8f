"""Anthropic's conversations as those that chat templates know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .schema import (
    Content,
    Message,
    PictureBlock,
    PromptRequest,
    RedactedThinking,
    TextBlock,
    Thinking,
    ToolReference,
    ToolResult,
    ToolUse,
)

_BILLING = "x-anthropic-billing-header:"
"""Begins a line that Claude Code puts in front of its instructions. It changes from request to
request, which would keep the prefix cache from ever finding them again."""


def conversation(body: PromptRequest) -> list[dict[str, Any]]:
    """The messages of a request, its instructions first."""
    texts = [without_billing(block.text) for block in body.system or ()]
    system = "\n\n".join(text for text in texts if text)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    names: dict[str, str] = {}
    for message in body.messages:
        if message.role == "assistant":
            messages.append(_assistant(message.content, names))
        else:
            _add_user(messages, message, names)
    return messages


def effort(body: PromptRequest) -> str | None:
    """How much the model is to think, in OpenAI's words."""
    if body.thinking is not None and body.thinking.type == "disabled":
        return "none"
    return None if body.output_config is None else body.output_config.effort


def without_billing(text: str) -> str:
    """Without Claude Code's changing line."""
    lines = text.splitlines(keepends=True)
    if not any(line.startswith(_BILLING) for line in lines):
        return text
    return "".join(line for line in lines if not line.startswith(_BILLING)).strip("\n")


def _assistant(content: Content, names: dict[str, str]) -> dict[str, Any]:
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for block in content:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, Thinking):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUse):
            names[block.id] = block.name
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = message["thinking"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _add_user(messages: list[dict[str, Any]], message: Message, names: dict[str, str]) -> None:
    """Texts that follow each other become one message: some templates want turns to alternate."""
    for block in message.content:
        if isinstance(block, ToolResult):
            result = {
                "role": "tool",
                "tool_call_id": block.tool_use_id,
                "content": _result(block),
            }
            if (name := names.get(block.tool_use_id)) is not None:
                result["name"] = name
            messages.append(result)
            continue
        if isinstance(block, TextBlock):
            text = block.text
        elif isinstance(block, PictureBlock):
            text = _note(block)
        elif isinstance(block, RedactedThinking | Thinking | ToolUse):
            continue
        if message.role == "system":  # within a conversation, where many templates refuse one
            text = f"<system-reminder>\n{text}\n</system-reminder>"
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += f"\n{text}"
        else:
            messages.append({"role": "user", "content": text})


def _result(result: ToolResult) -> str:
    text = "\n".join(_text(block) for block in result.content or ())
    return f"Error: {text}" if result.is_error else text


def _text(block: TextBlock | PictureBlock | ToolReference) -> str:
    if isinstance(block, TextBlock):
        return block.text
    return _note(block) if isinstance(block, PictureBlock) else block.tool_name


def _note(block: PictureBlock) -> str:
    return f"[{block.type} left out: this model reads text only]"


def pictures(messages: Sequence[Message]) -> int:
    """How many blocks a note has replaced."""
    count = 0
    for message in messages:
        for block in message.content:
            inner = block.content or () if isinstance(block, ToolResult) else (block,)
            count += sum(isinstance(one, PictureBlock) for one in inner)
    return count
