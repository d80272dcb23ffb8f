"""A step as data: nodes over named buffers, the op table that checks them, and what is known of
such a program without running it."""

from .node import Buffer, Node, repeated
from .program import Builder, Program

__all__ = ["Buffer", "Builder", "Node", "Program", "repeated"]
