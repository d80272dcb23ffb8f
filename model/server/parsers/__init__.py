"""Text of a model, as it streams: reasoning, content and tool calls."""

from .events import Content, Event, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart
from .parser import Parser, PlainParser, StreamParser

__all__ = [
    "Content",
    "Event",
    "Parser",
    "PlainParser",
    "Reasoning",
    "StreamParser",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "parser_for",
]


def parser_for(model_type: str, chat_template: str = "") -> Parser:
    """The parser of a model's family.

    Args:
        model_type: of its config.
        chat_template: the text of its template, which decides where a family has several formats.
    """
    return PlainParser()
