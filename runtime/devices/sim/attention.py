"""What attention computes: with keys and values as they lie, or with those of each head, expanded
from latents (MLA) for sequences of many tokens in a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ...kv_cache.layout import cache_inputs
from ...program import Node, Program
from .load import Load
from .machine import Cpu, Gpu, kernel_of

LAUNCHES = 5
"""Kernels of ``attention_expanded`` on a GPU: latents are read, two products expand them, the one
of keys behind a copy of its matrices, and queries attend."""
_ROWS = 512
"""Queries that share an expansion on the CPU, where an item is one head and so many of them
(``pykernels.cpu.attention.expanded``)."""


def is_latent(node: Node) -> bool:
    """Whether all heads of a token read the same key (MLA)."""
    return bool(node.attr("kv_heads") == 1 and node.attr("dk") != node.attr("dv"))


@dataclass(frozen=True)
class Attention:
    """Attention of a device's part of a step."""

    program: Program
    load: Load

    @cached_property
    def expands(self) -> bool:
        """Whether sequences have so many tokens in the step that latents are expanded for them."""
        each = self.load.tokens / self.load.sequences
        return any(
            node.op == "attention_expanded" and each >= node.attr("expand_from")
            for node in self.program.nodes
        )

    @cached_property
    def touched(self) -> Mapping[str, float]:
        """The part that a step uses of a buffer, by name, where it does not use all: of the queries
        of expanded sequences it uses what is rotated."""
        if not self.expands:
            return {}
        found = {}
        for node in self.program.nodes:
            if node.op == "attention_expanded":
                latent = self.program.weight(node, "uv").shape[2]
                row = math.prod(self.program.shape(node.inputs["q"])[1:]) // node.attr("heads")
                found[node.inputs["q"]] = (row - latent) / row
        return found

    def keys(self, node: Node) -> int:
        """How many keys of a sequence a token attends to."""
        return min(self.load.context, node.attr("window") or self.load.context)

    def seconds(self, node: Node, part: Cpu | Gpu, flops: float, sequences: int) -> float:
        """Seconds of computing ``attention``."""
        rate, latent = part.attention_tflops, is_latent(node)
        if latent:
            rate = part.latent_attention_tflops or rate
        seconds = flops / (rate * 1e12)
        if latent and isinstance(part, Gpu) and part.fp8_latents_gnumbers_s:
            numbers = self.keys(node) * sequences * self._fp8_numbers(node)
            seconds += numbers / (part.fp8_latents_gnumbers_s * 1e9)
        return seconds

    def expanded(self, node: Node, part: Cpu | Gpu, tokens: float) -> float:
        """Seconds of computing ``attention_expanded``, the expansion of all keys among it.

        On the CPU workers take it head by head. They make a head's matrices float32 first, column
        by column by products with unit vectors, and expand by products of many rows in float32, as
        heads multiply a latent.

        Args:
            tokens: of this device.
        """
        heads, nope, dv = (node.attr(name) for name in ("heads", "nope", "dv"))
        latent = self.program.weight(node, "uv").shape[2]
        rope = math.prod(self.program.shape(node.inputs["q"])[1:]) // heads - latent
        each = self.load.tokens / self.load.sequences
        every = (self.load.context + each / 2) * self.load.sequences
        attending = 2.0 * heads * (nope + rope + dv) * self.load.context * tokens
        expanding = 2.0 * heads * latent * (nope + dv) * every
        if isinstance(part, Gpu):
            product = kernel_of(part.kernels, "bf16").tflops
            return attending / (part.attention_tflops * 1e12) + expanding / (product * 1e12)
        times = math.ceil(each / _ROWS)
        items = heads * times * self.load.sequences
        idle = math.ceil(items / part.cores) * part.cores / items
        kernel = kernel_of(part.kernels, self.program.weight(node, "uv").fmt)
        padded = latent * (nope * _padded(nope) + dv * _padded(latent))
        columns = 2.0 * heads * self.load.sequences * padded / (kernel.few_tflops or kernel.tflops)
        seconds = attending / part.attention_tflops
        seconds += times * (expanding / part.latent_attention_tflops + columns)
        return idle * seconds / 1e12

    def _fp8_numbers(self, node: Node) -> int:
        """Numbers of a key that lie in FP8 and are decoded; 0: none does."""
        buffers = {name: self.program.buffers[name] for name in cache_inputs(node).values()}
        return sum(
            math.prod(self.program.shape(name)[2:])
            for name, buffer in buffers.items()
            if "float8" in str(buffer.dtype)
        )


def _padded(inputs: int) -> int:
    """Inputs of a packed matrix."""
    return -(-inputs // 128) * 128
