"""What nodes hand blocks to each other by, as the levels in front of it see it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from ...kv_cache.page_store import Bytes
from .block import BlockName
from .folder import Found
from .ram import RamBlocks


class SharedBlocks(Protocol):
    """Blocks of several machines: a store (``mooncake``), or other nodes' memory (``transfer``).

    Attributes:
        level: what figures call it; ``root``: where it is, for people.
        names: of files of blocks that were there when somebody asked, or were put there.
        rows: memory from which they are put without a copy; None: it is copied in any case.
    """

    level: str
    root: str
    names: set[str]

    @property
    def rows(self) -> RamBlocks | None: ...

    def offers(self, name: str) -> bool:
        """Whether other nodes can have the block of this file's name from here."""
        ...

    def batch(self, blocks: Sequence[BlockName]) -> Sequence[BlockName]:
        """As many of these, from the first on, as are got at once."""
        ...

    def ask(self, names: Iterable[str]) -> None:
        """Finds which of these blocks are there. Raises OSError: it cannot be said."""
        ...

    def prefetch(self, blocks: Sequence[BlockName]) -> None:
        """Gets blocks that ``read`` will be asked for next, in one batch. Raises OSError."""
        ...

    def has_ahead(self, block: BlockName) -> bool:
        """Whether ``prefetch`` has got it."""
        ...

    def read(self, block: BlockName) -> tuple[Found, Bytes]:
        """Whether a block is there and whole, and its payload, valid until the next call.

        Raises:
            OSError: of what is there.
        """
        ...

    def write_all(self, blocks: Sequence[BlockName], data: Sequence[Bytes]) -> list[int]:
        """Puts blocks there, at most a ``batch``.

        Returns:
            Bytes of each; 0: there is no room for it now.

        Raises:
            OSError: nothing was put there.
        """
        ...

    def close(self) -> None:
        """Nothing is read or written any more."""
        ...
