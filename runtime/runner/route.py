"""Which GPUs read a step of prompts."""

from __future__ import annotations

from enum import StrEnum


class Route(StrEnum):
    """Ways of a step of prompts, by which GPUs read it."""

    CHUNKED = "chunked"
    """Chunks of prompts are in the main runner's steps, beside the requests that decode."""
    STREAMED = "streamed"
    """A step of its own on the GPU of those steps."""
    DSLP = "dslp"
    """A step of its own, shared by all GPUs."""
    DISAGGREGATED = "disaggregated"
    """A step of its own on GPUs on which nothing decodes."""
