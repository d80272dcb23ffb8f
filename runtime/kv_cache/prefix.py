"""Which pages hold which tokens: a tree of full pages, found by a chain of hashes.

A page's keys and values depend on its own tokens and on all before them, so a page is known by its
tokens and its parent. The key is ``blake2b(parent's key, tokens)``: the same in every process, so
that a store of pages outside this one can use it too. Tokens and parent are compared as well: two
pages whose keys collide are never taken for each other.

Where a model computes the tokens of an output in another way than those of a prompt (Expert
Deferral), the same tokens give other keys and values in each, and are other tokens in a page's key.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

T = TypeVar("T")

KEY_BYTES = 16
ROOT = bytes(KEY_BYTES)

PageKey = tuple[bytes, bytes]
"""Key of a full page, and its tokens as int32: t, or ~t where it is computed as an output's."""


def extend_keys(
    keys: list[PageKey],
    tokens: Sequence[int],
    pages: int,
    page_size: int,
    output_from: int | None = None,
) -> None:
    """Append to ``keys`` until it has those of the first ``pages`` full pages of ``tokens``.

    Args:
        output_from: the first token that is computed as one of an output; None: there is no
            difference.
    """
    parent = keys[-1][0] if keys else ROOT
    for i in range(len(keys), pages):
        first, last = i * page_size, (i + 1) * page_size
        own = array("i", tokens[first:last])
        for at in range(max(first, last if output_from is None else output_from), last):
            own[at - first] = ~own[at - first]
        data = own.tobytes()
        parent = blake2b(parent + data, digest_size=KEY_BYTES).digest()
        keys.append((parent, data))


@dataclass(frozen=True)
class Held:
    """What an engine has of a prompt: leading full pages.

    Attributes:
        cached: in its cache.
        stored: in what it shares with other engines; 0: it shares nothing.
        storing: whether some of them are on their way there.
        takes: whether it would read pages from there that it lacks, and not compute them faster.
    """

    cached: int
    stored: int = 0
    storing: bool = False
    takes: bool = True


def leading(keys: Iterable[T], there: Callable[[T], bool]) -> int:
    """How many of them are there up to the first that is not."""
    count = 0
    for key in keys:
        if not there(key):
            break
        count += 1
    return count


class PrefixNode:
    """One full page in the tree."""

    __slots__ = ("data", "key", "page", "parent")

    def __init__(self, key: bytes, data: bytes, parent: PrefixNode | None, page: int) -> None:
        self.key, self.data, self.parent, self.page = key, data, parent, page


def path_to(node: PrefixNode | None) -> list[PrefixNode]:
    """A page and all before it, from the root on."""
    path: list[PrefixNode] = []
    while node is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


class PrefixTree:
    """Full pages by their tokens, and the order in which unreferenced ones are evicted.

    Whoever holds a page holds all its ancestors, and gives the deepest back first. So the least
    recently used page is always a leaf, and evicting it cuts nothing off.
    """

    def __init__(self) -> None:
        self._nodes: dict[bytes, PrefixNode] = {}
        self._of_page: dict[int, PrefixNode] = {}
        self._idle: OrderedDict[int, PrefixNode] = OrderedDict()  # unreferenced, the oldest first

    def __len__(self) -> int:
        """Number of pages in the tree."""
        return len(self._of_page)

    def __contains__(self, node: PrefixNode) -> bool:
        return self._nodes.get(node.key) is node

    def has(self, page: int) -> bool:
        """Whether a page is in the tree."""
        return page in self._of_page

    @property
    def idle(self) -> int:
        """Number of pages in the tree that no page table names: they can be evicted."""
        return len(self._idle)

    def match(self, keys: Sequence[PageKey], limit: int) -> list[PrefixNode]:
        """The longest cached prefix, at most ``limit`` pages, from the root on."""
        matched: list[PrefixNode] = []
        parent = None
        for i in range(limit):
            node = self.find(parent, keys[i])
            if node is None:
                break
            matched.append(node)
            parent = node
        return matched

    def known(self, keys: Iterable[bytes]) -> list[PrefixNode]:
        """Leading pages with these keys; any thread may ask."""
        found = []
        for key in keys:
            if (node := self._nodes.get(key)) is None:
                break
            found.append(node)
        return found

    def find(self, parent: PrefixNode | None, key: PageKey) -> PrefixNode | None:
        node = self._nodes.get(key[0])
        if node is None or node.parent is not parent or node.data != key[1]:
            return None
        return node

    def insert(self, parent: PrefixNode | None, key: PageKey, page: int) -> PrefixNode | None:
        """Add a referenced page; None if another page with other tokens has the same key."""
        if key[0] in self._nodes:
            return None
        node = PrefixNode(key[0], key[1], parent, page)
        self._nodes[key[0]] = self._of_page[page] = node
        return node

    def hold(self, page: int) -> None:
        """A page of the tree is referenced: it cannot be evicted."""
        self._idle.pop(page, None)

    def keep(self, page: int) -> bool:
        """The last reference is gone; whether the page is in the tree and stays there for now."""
        node = self._of_page.get(page)
        if node is None:
            return False
        self._idle[page] = node
        return True

    def remove(self, node: PrefixNode) -> bool:
        """Forget a page whatever holds it; False if it was evicted before. The caller removes what
        lies behind it as well."""
        if node not in self:
            return False
        del self._nodes[node.key], self._of_page[node.page]
        self._idle.pop(node.page, None)
        return True

    def evict(self) -> PrefixNode:
        """Forget the least recently used page and return it. Raises KeyError if all are held."""
        page, node = self._idle.popitem(last=False)
        del self._nodes[node.key], self._of_page[page]
        return node
