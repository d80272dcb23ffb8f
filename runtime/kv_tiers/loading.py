"""Requests for blocks of the levels behind the pages, and who waits for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..kv_cache import PageTable
from ..kv_cache.page_store import Kind
from ..kv_cache.prefix import PageKey, PrefixNode
from .blocks.block import BlockName


@dataclass(eq=False)
class Load:
    """Blocks to be read into pages that nobody else has, in order, and perhaps a state.

    Attributes:
        pages: block and page of each; ``state``: block and slot.
        cancelled: the rest is not needed any more.
        loaded: how many of the pages are read; ``has_state``: whether the state is.
    """

    pages: list[tuple[BlockName, int]]
    state: tuple[BlockName, int] | None = None
    cancelled: bool = False
    loaded: int = 0
    has_state: bool = False


@dataclass(eq=False)
class Stage:
    """Blocks to be brought near, in order, for a request for which there are no pages yet.

    Attributes:
        done: how many of them are near, or gone.
    """

    blocks: list[BlockName]
    cancelled: bool = False
    done: int = 0


@dataclass(eq=False)
class Ask:
    """Which of these files' blocks a store has: known when it has ended."""

    names: list[str]
    ended: bool = False


@dataclass
class Loading:
    """A load, what of the tree it goes on from, and the keys of what it brings."""

    load: Load
    behind: list[PrefixNode]
    keys: list[PageKey]
    give_up: float
    last: tuple[int, PageKey]
    """The deepest page that it is for, and how many are before it."""

    def is_for(self, table: PageTable) -> bool:
        """Whether a request, whose keys are known, begins with what it brings."""
        at, key = (len(self.behind), self.keys[0]) if self.keys else self.last
        return len(table.keys) > at and table.keys[at] == key


class Found(NamedTuple):
    """What the tree and the levels have of a prompt."""

    hits: list[PrefixNode]
    """Pages of the tree."""
    depth: int
    """Pages with those of the levels."""
    saved: int
    """Pages that need not be computed if blocks are read."""
    state: bool
    """Whether a state is to be read behind them."""
    missing: list[tuple[Kind, PageKey]]
    """What nobody here has, and would be of use."""
