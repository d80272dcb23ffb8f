"""What one sequence has of the cache."""

from __future__ import annotations

from .prefix import PageKey, PrefixNode
from .states import NO_SLOT


class PageTable:
    """The pages of one sequence, position p at ``pages[p // page_size]``.

    It lives as long as its request: the keys of its tokens outlast a preemption.

    Attributes:
        output_from: the first token whose keys and values are others in an output than in a prompt;
            None: there is no difference.
        forks: whether other sequences begin with the same prompt at once.
        slot: of its state; ``NO_SLOT``: it has none.
        source: the page behind whose snapshot its state began; None: from nothing.
        marks, saved, latest: for ``Snapshots``: pages behind which a snapshot is to be taken; the
            slot of one of pages that are not in the tree yet; the page of the output's last one.
        full, in_step: likewise: the last page that its prompt fills; the slot to which the
            scheduled step saves the state behind it.
        window_first, window_end, kept: for ``WindowPages``: it has the pages of layers with a
            window from the first to before the end; those that are kept longest behind it.
    """

    __slots__ = (
        "cached",
        "forks",
        "full",
        "in_step",
        "kept",
        "keys",
        "latest",
        "marks",
        "node",
        "output_from",
        "pages",
        "row",
        "saved",
        "slot",
        "source",
        "window_end",
        "window_first",
    )

    def __init__(self, forks: bool = False) -> None:
        self.output_from: int | None = None
        self.forks = forks
        self.slot = self.saved = self.in_step = NO_SLOT
        self.full = 0
        self.source: PrefixNode | None = None
        self.latest: PrefixNode | None = None
        self.marks: list[int] = []
        self.window_first = self.window_end = 0
        self.kept: list[range] = []
        self.pages: list[int] = []
        self.row = -1  # of BlockManager.tables; -1: holds no pages
        self.keys: list[PageKey] = []
        self.cached = 0  # leading pages that are in the tree
        self.node: PrefixNode | None = None  # of the last of these
