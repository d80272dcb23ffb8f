"""What a node costs on a machine: seconds if nothing else ran, and what it takes of main memory.

Three terms make a kernel's time: what it reads over the rate of reading, or decoding and
multiplying, whichever is longer; and what starting it takes. A node that moves experts takes the
link's time, and main memory's; so does what devices send each other where they meet.
"""

from __future__ import annotations

import math
from functools import lru_cache

from ...planning.placement import CPU
from ...planning.work import Work
from ...program import Node, Program
from ...program.analysis import experts_per_token, share_of_experts
from ...program.op_table.collectives import ALL_TOKENS
from ...program.step_inputs import STATE_SLOTS
from .activations import activation_bytes
from .attention import LAUNCHES, Attention, is_latent
from .load import Load as Load
from .machine import Cpu, Gpu, Kernel, Machine, kernel_of
from .meetings import MEETS, met
from .terms import COMPUTE, GPU_MEMORY, LAUNCH, LINK, MEMORY, PEER, Cost

_PRODUCTS = ("linear", "per_head_linear", "moe_ffn")
_LAUNCHES = {"moe_ffn": 2}
"""Kernels of an op on a GPU, jobs on the CPU; one of all others."""
_GPU_LAUNCHES = _LAUNCHES | {"attention_expanded": LAUNCHES, "submit": 2, "wait": 2}
"""Of routed experts and of parts of a buffer one more: sums over a token's experts, copies."""
_TASKS, _MANY = 16, 5
"""Tasks of each worker, into which the first two matrices of the experts of a call of few tokens
are cut; tokens of each expert from which a call has many."""
_LATENT_LAUNCHES, _PARTED = 3, 1024
"""Of a decode step's attention to so many latents on a GPU: parts of the keys, and what they give
together, take as long as three kernels that do next to nothing."""


@lru_cache(maxsize=4096)
def _by_rows(kernel: Kernel, weights: float, rows: tuple[tuple[float, float], ...]) -> float:
    """Seconds of experts of so many weights each (``Routing.rows``)."""
    return sum(chance * kernel.seconds(weights, 2 * weights * count) for chance, count in rows)


def _unbalanced(
    kernel: Kernel,
    weights: float,
    rows: tuple[tuple[float, float], ...],
    planned: float,
    seconds: float,
) -> float:
    """How many times as long experts of few tokens take because workers run dry at the end of their
    first two matrices, where a call of one token takes 1 (kernels' rates are such calls').

    Tasks are cut as if ``planned`` experts were taken, one each of a call's pairs of tokens and
    experts. Where tokens agree, there are fewer tasks, and those of an expert of many are longest;
    on average a worker waits for half of one.
    """
    most = max((count for _, count in rows), default=0.0)
    if not seconds:
        return 1.0
    longest = planned * kernel.seconds(weights, 2 * weights * most) / seconds
    return 1 + max(0.0, longest - 1) / 3 / _TASKS


class CostModel:
    """Costs of the nodes of one device's part of a step.

    Args:
        whole: the program that ``program`` is a part of: which experts are on another device.
    """

    def __init__(self, machine: Machine, program: Program, whole: Program, load: Load) -> None:
        self.machine, self.program, self.full, self.load = machine, program, whole, load
        self._attends = Attention(program, load)

    def of(self, node: Node, work: Work) -> Cost:
        """A node's cost.

        Args:
            work: of ``Compiled.work``, by which cache and products other than experts count.
        """
        if node.op in MEETS:
            return met(node, self.program, self.machine, self._filled)
        on_cpu = node.device == CPU
        part: Cpu | Gpu = self.machine.cpu if on_cpu or not self.machine.gpu else self.machine.gpu
        if node.op == "one_shot_all_reduce" and self.machine.gpu:  # a flag follows what has arrived
            taken = self.machine.gpu.launch_us + self.machine.gpu.peer_us
            return Cost(taken * 1e-6, bound=PEER)
        if node.op in ("load_experts", "load_weights"):
            return self._crossing(node, work)
        if node.op == "load_pages":
            return self._crossing(node, work, self.load.sequences)
        if node.op == "unpack_experts":
            moved = self._piece(node)
            return self._unpacking(2 * moved)
        if self._is_left_out(node):
            return Cost(0.0 if not on_cpu else self.machine.cpu.job_us * 1e-6)
        nbytes, weights, flops = self._products(node, work)
        if node.op in ("attention", "attention_expanded"):
            return self._attention(node, part, work)
        if node.op not in _PRODUCTS:
            written = 2 if STATE_SLOTS in node.inputs else 1  # a step replaces the state
            nbytes = float(work.nbytes * self._sequences(node) * written)
            return self._timed(node, part, nbytes, 0.0, 0.0)
        kernel = kernel_of(part.kernels, self._format(node))
        computing = kernel.seconds(weights, flops)
        if on_cpu and node.op == "moe_ffn" and "ids" in node.inputs:
            computing = self._by_expert(node, kernel)
        return self._timed(node, part, nbytes, computing, nbytes)

    def _attention(self, node: Node, part: Cpu | Gpu, work: Work) -> Cost:
        """Keys and values of all sequences are read once; a latent's heads share what they read, so
        that they may compute longer than they read."""
        sequences = self._sequences(node)
        if node.op == "attention_expanded":
            computing = self._attends.expanded(node, part, self._tokens(node))
            return self._timed(node, part, 0.0, computing, 0.0)
        flops = work.flops * self._tokens(node) / max(1, self.load.tokens)
        computing = self._attends.seconds(node, part, flops, sequences)
        return self._timed(node, part, work.nbytes * sequences, computing, 0.0)

    def launches(self, node: Node) -> int:
        """Kernels of a node on a GPU."""
        if self._is_left_out(node):
            return 0
        more = node.op == "moe_ffn" and "ids" in node.inputs
        if node.op == "linear":
            outputs = self.program.weight(node, "weight").shape[0]
            more = self.program.shape(node.outputs["out"])[1] > outputs
        return _GPU_LAUNCHES.get(node.op, 1) + more

    def _is_left_out(self, node: Node) -> bool:
        """Whether it is for the tokens that attend to latents, or for the others, of which the step
        has none."""
        expands = self._attends.expands
        if node.op == "attention_expanded":
            return not expands
        of_latents = node.op == "per_head_linear" or (node.op == "attention" and is_latent(node))
        return expands and of_latents

    def _sequences(self, node: Node) -> int:
        """How many sequences the node takes: the step's, or those of its microbatch."""
        return -(-self.load.sequences // 2) if node.microbatch else self.load.sequences

    def _timed(
        self, node: Node, part: Cpu | Gpu, nbytes: float, computing: float, weights: float
    ) -> Cost:
        share = part.experts_share if node.op == "moe_ffn" else part.linear_share
        on_cpu = isinstance(part, Cpu)
        launches = _LAUNCHES.get(node.op, 1) if on_cpu else self.launches(node)
        moving = 0.0
        if isinstance(part, Gpu) and not self.load.decodes:
            parts = self._attends.touched
            moved = activation_bytes(node, self.program, self.full, self._filled, parts)
            moving = moved / (part.read_gbps * part.linear_share * 1e9)
        if node.op == "attention" and isinstance(part, Gpu):
            share = part.attention_share
            parted = self.load.decodes and self._attends.keys(node) >= _PARTED
            launches = _LATENT_LAUNCHES if is_latent(node) and parted else launches
        reading = nbytes / (part.read_gbps * share * 1e9)
        if on_cpu and self._opened(node):
            launches -= 1
        starting = launches * (part.job_us if isinstance(part, Cpu) else part.launch_us) * 1e-6
        # Products read and write rows while they multiply; rows of experts are moved before.
        seconds = max(reading + moving, computing)
        if node.op == "moe_ffn":
            seconds = max(reading, computing) + moving
        memory = MEMORY if on_cpu else GPU_MEMORY
        bound = LAUNCH if starting > seconds else (COMPUTE if computing > reading else memory)
        if isinstance(part, Gpu) and launches * part.host_us * 1e-6 > seconds + starting:
            return Cost(launches * part.host_us * 1e-6, 0.0, LAUNCH, weights)
        return Cost(seconds + starting, nbytes if on_cpu else 0.0, bound, weights)

    def _opened(self, node: Node) -> bool:
        """Whether a GPU's flag opens a node of the CPU: handing it to the workers is in the hop."""
        return node.op == "moe_ffn" and any(other.op == "wait" for other in self.program.nodes)

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
            if node.layer is None:  # a head multiplies the last tokens of each sequence alone
                rows = min(self.program.shape(node.outputs["out"])[0], self.load.logits)
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
            law = self.load.routing
            if spec.full is not None and node.role in ("routed", "deferred"):  # those of a rank
                part = spec.shape[0] / E
                distinct = law.distinct(E, topk, tokens) * part
                rows = tokens * topk * law.fullest(E, topk, round(1 / part))
            else:
                first, last = self._ranks(node, E)
                distinct = law.distinct(E, topk, tokens, first, last)
                rows = tokens * topk * law.share(E, topk, first, last)
        each = 3.0 * H * I
        return distinct * spec.bytes_per_expert, distinct * each, 2.0 * rows * each

    def _by_expert(self, node: Node, kernel: Kernel) -> float:
        """Seconds in which the CPU decodes and multiplies experts, each by the kernel that its
        number of tokens asks for: some have many where most have few."""
        spec = self.program.weight(node, "experts")
        E, H, I = (spec.full or spec).shape  # noqa: E741
        topk, tokens = float(experts_per_token(self.full, node.inputs["ids"])), self._tokens(node)
        first, last = self._ranks(node, E)
        rows = self.load.routing.rows(E, topk, tokens, first, last)
        seconds = _by_rows(kernel, 3.0 * H * I, rows)
        pairs = sum(chance * count for chance, count in rows)
        planned = min(E, pairs)
        if pairs >= _MANY * planned:
            return seconds
        return seconds * _unbalanced(kernel, 3.0 * H * I, rows, planned, seconds)

    def _ranks(self, node: Node, E: int) -> tuple[int, int]:
        """From which rank to which a node's experts are: slots hold those that are chosen most."""
        share = share_of_experts(self.full, node)
        if share == 1.0:
            return 0, E
        if node.role == "cached":
            return 0, round(share * E)
        return E - round(share * E), E
