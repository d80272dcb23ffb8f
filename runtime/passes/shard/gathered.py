"""Gathered keys and values: every rank brings its rows, and each writes all of them to its cache.

A rank's tokens then attend to pages, as on one rank, by the same kernels: also to what a sequence
has had before the step. A rank has a run of the step's tokens from the front and one from the end,
so a sequence may have two pieces there. A piece is a sequence of its own whose keys end with its
last token: of S sequences there are S + 1 pieces at the most, since only one has tokens in both.
"""

from __future__ import annotations

from dataclasses import replace

from ...kv_cache.layout import cache_inputs
from ...program import Node, Program
from ...program.op_table.collectives import ALL_TOKENS
from .striped import Stripe, gathered
from .stripes import of_all

_PAGE_TABLE = "page_table"


class Gathered(Stripe):
    """A rank whose cache gets all ranks' rows before it attends."""

    def __init__(self, program: Program, rank: int, ranks: int) -> None:
        super().__init__(program, rank, ranks)
        S, table = program.sizes["S"], program.buffers[_PAGE_TABLE]
        self.sizes = {"S": S + 1}
        self.buffers[_PAGE_TABLE] = replace(table, shape=(S, *table.shape[1:]))

    def _write(self, node: Node) -> list[Node]:
        """The rank's rows, those of all ranks, and these into the cache."""
        blocks, every, nodes = dict[str, str](), dict[str, str](), list[Node]()
        for part, cache in cache_inputs(node).items():
            blocks[part], every[part] = f"{cache}.block", f"{cache}.all"
            of_cache = self._program.buffers[cache]
            for name, rows in ((blocks[part], "T"), (every[part], ALL_TOKENS)):
                shape = rows, 1, *of_cache.shape[2:]
                self.buffers[name] = replace(of_cache, name=name, shape=shape, kind="scratch")
            name = f"{node.name}.{part}.all_gather"
            nodes.append(gathered(node, blocks[part], every[part], self._ranks, name))
        slots = self._input(of_all("slot_mapping"), ALL_TOKENS)
        to_cache = self._to_cache(node, every, slots, f"{node.name}.write")
        return [self._written_to(node, blocks), *nodes, to_cache]

    def _attend(self, node: Node) -> list[Node]:
        return [replace(node, inputs=self._inputs(node.inputs))]
