"""What a model's text becomes while it streams."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer, for the user to read."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. Its arguments follow, then its end; calls do not overlap.

    Attributes:
        index: number of the call in this message, from 0.
        id: unique among the calls of a conversation.
        name: the function's.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the arguments. All pieces of a call are the text of one JSON object, unless the
    output was cut off."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is complete."""

    index: int


Event = Content | Reasoning | ToolCallStart | ToolCallArguments | ToolCallEnd
