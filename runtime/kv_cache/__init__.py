"""Who owns which page of the paged KV cache: page pool, prefix tree, page tables. No tensors."""

from .block_manager import BlockManager, PageTable
from .pages import PagePool
from .prefix import PrefixTree

__all__ = ["BlockManager", "PagePool", "PageTable", "PrefixTree"]
