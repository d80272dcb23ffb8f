"""The paged KV cache: who owns which page (pool, prefix tree, page tables), what lies in one."""

from .block_manager import BlockManager
from .page_table import PageTable
from .pages import PagePool
from .prefix import PrefixTree

__all__ = ["BlockManager", "PagePool", "PageTable", "PrefixTree"]
