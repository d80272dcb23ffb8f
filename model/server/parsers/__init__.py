"""Text of a model, as it streams: reasoning, content and tool calls."""

from .choose import parser_for
from .message import Content, Event, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart
from .parser import Parser, StreamParser

__all__ = [
    "Content",
    "Event",
    "Parser",
    "Reasoning",
    "StreamParser",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "parser_for",
]
