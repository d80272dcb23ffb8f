"""Pages of the KV cache: reference counts and a free list."""

from __future__ import annotations


class PagePool:
    """Pages 0 .. num_pages - 1, each free, referenced, or kept.

    A reference is one page table that names the page. A page whose last reference is gone is
    *kept* until ``free`` is called: the caller decides whether the prefix tree still wants it.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.references = [0] * num_pages
        # Popped from the end: a young engine uses the low pages, in order.
        self._free = list(range(num_pages - 1, -1, -1))

    def __len__(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def allocate(self) -> int:
        """A free page, with one reference. Raises IndexError if there is none."""
        page = self._free.pop()
        self.references[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more reference to a page that is not free."""
        self.references[page] += 1

    def release(self, page: int) -> bool:
        """One reference less; whether it was the last."""
        left = self.references[page] - 1
        if left < 0:
            raise ValueError(f"page {page} was released more often than it was taken")
        self.references[page] = left
        return left == 0

    def free(self, page: int) -> None:
        """Give an unreferenced page back."""
        if self.references[page]:
            raise ValueError(f"page {page} is freed with {self.references[page]} references")
        self._free.append(page)
