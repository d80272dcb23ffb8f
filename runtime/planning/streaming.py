"""Which experts cross to a GPU in a step, and through which buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..machine.nodes import ONE_NODE, MemoryNodes
from ..passes.layers import moe_layers
from ..passes.shard import join, stripe, with_replicas
from ..passes.split_experts import split_experts
from ..passes.stream_weights import StreamRing, resident, stream_weights
from ..program import Program
from ..program.node import Node
from ..program.weight_spec import WeightSpec


def stored_bytes(spec: WeightSpec) -> int:
    """Bytes of experts as they are stored, for a device that computes from them."""
    return spec.nbytes


@dataclass(frozen=True)
class Streaming:
    """How the experts of a runner's steps are streamed.

    Attributes:
        tokens: budget of a step.
        nodes: NUMA nodes that have a slice of the experts each.
        layers: whose experts are; None: all.
        resident_bytes: bytes of a layer's experts in the layout of the device to which they cross.
        links: by GPU, bytes of experts a second that its link brings; empty until it is measured.
        shares: by GPU, numbers in proportion to which GPUs that share a step have them; empty where
            all have as many.
        exchange: of ``passes.shard.EXPERTS``: how GPUs with tokens of their own share experts.
    """

    ring: StreamRing
    tokens: int
    nodes: MemoryNodes = ONE_NODE
    layers: frozenset[int] | None = None
    resident_bytes: Callable[[WeightSpec], int] = stored_bytes
    links: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    exchange: str = "small_ep"

    def apply(self, program: Program) -> Program:
        """The program with its experts streamed."""
        return stream_weights(program, self.resident_bytes, self.ring, self.layers, self.nodes)

    def over(self, program: Program, gpus: Sequence[str]) -> Program:
        """The program of the first GPU with its tokens dealt over these GPUs, each of which streams
        the experts that it has (OSDI'26 3.2); on a single one it is as it was.

        Raises:
            PykernelsError: see ``passes.shard.stripe``.
        """
        (first,) = {node.device for node in program.nodes if node.op == "embed"}
        shares = self._shares(gpus)
        own = stripe(program, len(gpus), self.exchange, attention="gather", shares=shares)
        joined = join([self.apply(each.on(gpus[0])) for each in own], gpus)
        return joined if gpus[0] == first else with_replicas(joined, gpus[0])

    @property
    def link_bytes_per_s(self) -> float:
        """Bytes a second that the slowest link brings; 0 where none was measured."""
        return min(self.links.values(), default=0.0)

    def seconds(self, program: Program, over: Sequence[str] = ()) -> float:
        """Seconds in which all experts cross to these GPUs at once, to each its own part; where
        none are named, all of them by the slowest link. 0 where no link was measured."""
        if not self.links:
            return 0.0
        if not over:
            return self.nbytes(program) / self.link_bytes_per_s
        shares = self._shares(over)
        slowest = max(share / self.links[gpu] for share, gpu in zip(shares, over, strict=True))
        return self.nbytes(program) * slowest / sum(shares)

    def split(self, program: Program, share: float) -> Program:
        """The program with that share of each layer's experts streamed."""
        return split_experts(program, share, self.resident_bytes, self.ring, self.nodes)

    def streams_all(self, program: Program) -> bool:
        """Whether no experts are left to the CPU."""
        return len([*self.experts(program)]) == len(moe_layers(program))

    def nbytes(self, program: Program) -> int:
        """Bytes that cross in a step of such a program."""
        return sum(
            spec.nbytes - len(resident(program, node.layer)) * spec.bytes_per_expert
            for node, spec in self.experts(program)
        )

    def experts(self, program: Program) -> Iterator[tuple[Node, WeightSpec]]:
        """The experts that cross, with their nodes, layer by layer."""
        for layer in moe_layers(program):
            node = layer.experts
            if self.layers is None or node.layer in self.layers:
                yield node, program.weight(node, "experts")

    def _shares(self, gpus: Sequence[str]) -> tuple[float, ...]:
        return tuple(self.shares.get(gpu, 1.0) for gpu in gpus)
