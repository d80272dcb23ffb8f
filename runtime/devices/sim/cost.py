"""What a node costs on a machine: seconds if nothing else ran, and what it takes of main memory.

Three terms make a kernel's time: what it reads over the rate of reading, or decoding and
multiplying, whichever is longer; and what starting it takes. A node that moves experts takes the
link's time, and main memory's; so does what devices send each other where they meet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...kv_cache.layout import cache_inputs
from ...planning.placement import CPU
from ...planning.work import Work
from ...program import Node, Program
from ...program.analysis import experts_per_token, share_of_experts
from ...program.op_table.collectives import ALL_TOKENS
from ...program.step_inputs import STATE_SLOTS
from .machine import Cpu, Gpu, Machine, kernel_of
from .meetings import MEETS, met
from .routing import Routing
from .terms import COMPUTE, GPU_MEMORY, LAUNCH, LINK, MEMORY, Cost

_PRODUCTS = ("linear", "per_head_linear", "moe_ffn")
_LAUNCHES = {"moe_ffn": 2}
"""Kernels of an op on a GPU, jobs on the CPU; one of all others."""
_LATENT_LAUNCHES, _PARTED = 3, 1024
"""Of a decode step's attention to so many latents on a GPU: parts of the keys, and what they give
together, take as long as three kernels that do next to nothing."""


def _is_latent(node: Node) -> bool:
    """Whether all heads of a token read the same key (MLA)."""
    return bool(node.attr("kv_heads") == 1 and node.attr("dk") != node.attr("dv"))


@dataclass(frozen=True)
class Load:
    """What a step is of.

    Attributes:
        tokens, context: see ``planning.work``; ``sequences``: whose caches it reads.
        routing: by which experts are chosen.
    """

    tokens: int = 1
    context: int = 0
    sequences: int = 1
    routing: Routing = Routing()

    @property
    def decodes(self) -> bool:
        """Whether every sequence has one token."""
        return self.tokens == self.sequences


class CostModel:
    """Costs of the nodes of one device's part of a step.

    Args:
        whole: the program that ``program`` is a part of: which experts are on another device.
    """

    def __init__(self, machine: Machine, program: Program, whole: Program, load: Load) -> None:
        self.machine, self.program, self.full, self.load = machine, program, whole, load

    def of(self, node: Node, work: Work) -> Cost:
        """A node's cost.

        Args:
            work: of ``Compiled.work``, by which cache and products other than experts count.
        """
        if node.op in MEETS:
            return met(node, self.program, self.machine, self._filled)
        on_cpu = node.device == CPU
        part: Cpu | Gpu = self.machine.cpu if on_cpu or not self.machine.gpu else self.machine.gpu
        if node.op in ("load_experts", "load_weights"):
            return self._crossing(node, work)
        if node.op == "load_pages":
            return self._crossing(node, work, self.load.sequences)
        if node.op == "unpack_experts":
            moved = self._piece(node)
            return self._unpacking(2 * moved)
        nbytes, weights, flops = self._products(node, work)
        if node.op == "attention":
            return self._attention(node, part, work)
        if node.op not in _PRODUCTS:
            written = 2 if STATE_SLOTS in node.inputs else 1  # a step replaces the state
            nbytes = float(work.nbytes * self._sequences(node) * written)
            return self._timed(node, part, nbytes, 0.0, 0.0)
        kernel = kernel_of(part.kernels, self._format(node))
        return self._timed(node, part, nbytes, kernel.seconds(weights, flops), nbytes)

    def _attention(self, node: Node, part: Cpu | Gpu, work: Work) -> Cost:
        """Keys and values of all sequences are read once; a latent's heads share what they read, so
        that they may compute longer than they read."""
        sequences, latent = self._sequences(node), _is_latent(node)
        rate = part.attention_tflops
        flops = work.flops * self._tokens(node) / max(1, self.load.tokens)
        if latent and self.load.decodes:
            rate = part.latent_attention_tflops or rate
        elif latent:
            flops *= self._expanded(node)
        seconds = flops / (rate * 1e12)
        if latent and isinstance(part, Gpu) and part.fp8_latents_gnumbers_s:
            numbers = self._keys(node) * sequences * self._fp8_numbers(node)
            seconds += numbers / (part.fp8_latents_gnumbers_s * 1e9)
        return self._timed(node, part, work.nbytes * sequences, seconds, 0.0)

    def _keys(self, node: Node) -> int:
        """How many keys of a sequence a token attends to."""
        return min(self.load.context, node.attr("window") or self.load.context)

    def _fp8_numbers(self, node: Node) -> int:
        """Numbers of a key that lie in FP8 and are decoded; 0: none does."""
        buffers = {name: self.program.buffers[name] for name in cache_inputs(node).values()}
        return sum(
            math.prod(self.program.shape(name)[2:])
            for name, buffer in buffers.items()
            if "float8" in str(buffer.dtype)
        )

    def _sequences(self, node: Node) -> int:
        """How many sequences the node takes: the step's, or those of its microbatch."""
        return -(-self.load.sequences // 2) if node.microbatch else self.load.sequences

    def _timed(
        self, node: Node, part: Cpu | Gpu, nbytes: float, computing: float, weights: float
    ) -> Cost:
        share = part.experts_share if node.op == "moe_ffn" else part.linear_share
        launches = _LAUNCHES.get(node.op, 1)
        if node.op == "attention" and isinstance(part, Gpu):
            share = part.attention_share
            parted = self.load.decodes and self._keys(node) >= _PARTED
            launches = _LATENT_LAUNCHES if _is_latent(node) and parted else launches
        reading = nbytes / (part.read_gbps * share * 1e9)
        on_cpu = isinstance(part, Cpu)
        starting = launches * (part.job_us if isinstance(part, Cpu) else part.launch_us) * 1e-6
        seconds = max(reading, computing)
        memory = MEMORY if on_cpu else GPU_MEMORY
        bound = LAUNCH if starting > seconds else (COMPUTE if computing > reading else memory)
        if isinstance(part, Gpu) and launches * part.host_us * 1e-6 > seconds + starting:
            return Cost(launches * part.host_us * 1e-6, 0.0, LAUNCH, weights)
        return Cost(seconds + starting, nbytes if on_cpu else 0.0, bound, weights)

    def _unpacking(self, nbytes: float) -> Cost:
        gpu = self.machine.gpu
        assert gpu is not None
        seconds = nbytes / (gpu.read_gbps * gpu.linear_share * 1e9)
        return Cost(seconds + gpu.launch_us * 1e-6, 0.0, GPU_MEMORY)

    def _crossing(self, node: Node, work: Work, times: int = 1) -> Cost:
        gpu = self.machine.gpu
        assert gpu is not None
        moved = self._piece(node) if node.op == "load_experts" else float(work.nbytes * times)
        if not moved:  # a dense weight: all of it
            moved = float(sum(self.program.weight(node, name).nbytes for name in node.weights))
        return Cost(moved / (gpu.link_gbps * 1e9) + 5e-6, moved, LINK, moved, moved)

    def _expanded(self, node: Node) -> float:
        """The part of a prompt's operations that is left where latent keys and values are expanded
        for each head: of the sizes of these instead of the latent's."""
        latent = node.attr("dv")
        heads = (
            self.program.weight(other, "heads").shape
            for other in self.program.nodes
            if other.layer == node.layer and other.op == "per_head_linear"
        )
        plain = sum(size for _, *sizes in heads for size in sizes if size != latent)
        rope = node.attr("dk") - latent
        return min(1.0, (plain + rope) / (node.attr("dk") + latent)) if plain else 1.0

    @property
    def _filled(self) -> float:
        """The part of the rows that the program has room for that the step's tokens take."""
        sizes = self.program.sizes
        return min(1.0, self.load.tokens / int(sizes.get(ALL_TOKENS, sizes["T"])))

    def _tokens(self, node: Node) -> float:
        """How many tokens the node takes: the step's, those of its microbatch or of its rank, or
        pairs of a token and an expert."""
        if node.microbatch:
            return -(-self.load.tokens // 2)
        return self.program.shape(next(iter(node.outputs.values())))[0] * self._filled

    def _piece(self, node: Node) -> float:
        """Bytes of the experts that a node loads or unpacks."""
        spec = self.program.weight(node, "experts")
        return float(node.attr("count") * spec.bytes_per_expert)

    def _format(self, node: Node) -> str:
        port = {"linear": "weight", "per_head_linear": "heads"}.get(node.op, "experts")
        return self.program.weight(node, port).fmt

    def _products(self, node: Node, work: Work) -> tuple[float, float, float]:
        """Bytes and numbers of the weights that a node reads, and its operations."""
        nbytes, flops = float(work.nbytes), float(work.flops)
        if node.op in ("linear", "per_head_linear"):
            port = "weight" if node.op == "linear" else "heads"
            spec = self.program.weight(node, port)
            numbers = float(math.prod(spec.shape))
            rows = self._tokens(node)
            if node.layer is None:  # a head multiplies the last token of each sequence alone
                rows = min(self.program.shape(node.outputs["out"])[0], self.load.sequences)
            flops = 2.0 * numbers * rows
            return nbytes, numbers, flops
        return self._experts(node) if node.op == "moe_ffn" else (nbytes, 0.0, flops)

    def _experts(self, node: Node) -> tuple[float, float, float]:
        """``_products`` of the experts that a step's tokens choose."""
        spec = self.program.weight(node, "experts")
        E, H, I = (spec.full or spec).shape  # noqa: E741
        ids, tokens = node.inputs.get("ids"), self._tokens(node)
        distinct, rows = float(spec.shape[0]), float(tokens)
        if ids is not None:
            topk = float(experts_per_token(self.full, ids))
            first, last = self._ranks(node, E)
            law = self.load.routing
            distinct = law.distinct(E, topk, tokens, first, last)
            rows = tokens * topk * law.share(E, topk, first, last)
        each = 3.0 * H * I
        return distinct * spec.bytes_per_expert, distinct * each, 2.0 * rows * each

    def _ranks(self, node: Node, E: int) -> tuple[int, int]:
        """From which rank to which a node's experts are: slots hold those that are chosen most."""
        share = share_of_experts(self.full, node)
        if share == 1.0:
            return 0, E
        if node.role == "cached":
            return 0, round(share * E)
        return E - round(share * E), E
