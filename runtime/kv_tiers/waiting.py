"""What was done for requests that wait, so that what they need is near when it is their turn."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..kv_cache import PageTable
from .loading import Load, Stage


@dataclass(eq=False)
class Wait:
    """One request's.

    Attributes:
        sought: how often levels were asked for its prefix, and have answered.
        depth: leading pages of it that were in the tree after that.
        load: that was begun for it last; ``filled``: pages that one brought, and that are kept for
            it until somebody needs them sooner.
        asked: whether a store was asked for it.
        lacks: pages that it was refused for want of.
        stages: the blocks that come near without pages; ``staged``: how many; ``near``: whether
            there are no more.
    """

    sought: int = 0
    depth: int = 0
    load: Load | None = None
    filled: int = 0
    asked: bool = False
    lacks: int = 1
    stages: list[Stage] = field(default_factory=list)
    staged: int = 0
    near: bool = False


class Waiting:
    """All of them.

    Attributes:
        filled, staged: pages and blocks of all.
    """

    def __init__(self) -> None:
        self._of: dict[PageTable, Wait] = {}
        self.filled = self.staged = 0

    def __getitem__(self, table: PageTable) -> Wait:
        if (wait := self._of.get(table)) is None:
            wait = self._of[table] = Wait()
        return wait

    def add_stage(self, wait: Wait, stage: Stage) -> None:
        """Blocks come near for it."""
        wait.stages.append(stage)
        wait.staged += len(stage.blocks)
        self.staged += len(stage.blocks)

    def has_loaded(self, load: Load, depth: int) -> None:
        """What was read for a request is in the tree, which has so many pages of it now."""
        for wait in self._of.values():
            if wait.load is load:
                wait.depth, wait.load = depth, None
                self.filled += load.loaded - wait.filled
                wait.filled = load.loaded

    def leave(self, table: PageTable) -> None:
        """Its request waits no more."""
        if (wait := self._of.pop(table, None)) is None:
            return
        self.filled -= wait.filled
        self.staged -= wait.staged
        for stage in wait.stages:
            stage.cancelled = True
