"""The parts of a program: buffers, and the nodes that read and write them by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from .op_table.collectives import ALL_TOKENS
from .ops import OPS
from .sizes import MICROBATCHES, microbatch_dim
from .weight_spec import WeightSpec

Dim = int | str
"""A size, or the name of one that differs from step to step, one of ``RANK_SIZES``."""

STEP_SIZES = ("T", "S", "R", *map(microbatch_dim, MICROBATCHES))
"""Tokens, sequences and sampled rows of a step, then the tokens of each of its microbatches; in
this order devices have them."""
RANK_SIZES = (*STEP_SIZES, ALL_TOKENS)
"""The same where ranks have tokens of their own, and then those of all ranks."""


def _none() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True)
class Buffer:
    """Memory that nodes write and read.

    Attributes:
        shape: sizes, outermost first.
        kind: "scratch", written and read within a step; "input", written before it; "output", read
            after it; "cache", kept from step to step.
        filled: the buffer [1] that says how many of its first rows hold anything, which crosses
            with it; "": all do.
    """

    name: str
    shape: tuple[Dim, ...]
    dtype: torch.dtype = torch.float32
    kind: str = "scratch"
    filled: str = ""


@dataclass(frozen=True)
class Node:
    """One operation.

    Attributes:
        op: a name of ``ops.OPS``, which says what the mappings hold.
        inputs, outputs: the op's names for what it reads and writes -> names of buffers. A buffer
            with the same name in both is updated in place.
        weights: the op's names for what does not change from step to step -> names of weights of
            the program.
        attrs: constants of the op; read them with ``attr``, which knows the defaults.
        device: where it runs: "cpu", "cuda:0", "ref".
        name: unique in a program.
        layer: the decoder layer that it belongs to; None outside the layers.
        role: what it does in its layer, one of ``ops.ROLES``; passes find nodes by it.
        microbatch: one of ``microbatches.MICROBATCHES``; "" where a program has none, or both are
            joined.
        numa: index of the NUMA node whose workers run it, from memory of its own; None: all
            workers.
        on_stream: the stream of its device that runs it; None: that of its op.
    """

    op: str
    inputs: Mapping[str, str] = field(default_factory=_none)
    outputs: Mapping[str, str] = field(default_factory=_none)
    weights: Mapping[str, str] = field(default_factory=_none)
    attrs: Mapping[str, Any] = field(default_factory=_none)
    device: str = "cpu"
    name: str = ""
    layer: int | None = None
    role: str = ""
    microbatch: str = ""
    numa: int | None = None
    on_stream: str | None = None

    @property
    def stream(self) -> str:
        """The stream of its device that runs it. Nodes of one stream run in order; across streams
        only what shares a buffer waits."""
        return OPS[self.op].stream if self.on_stream is None else self.on_stream

    def attr(self, name: str) -> Any:
        """An attribute, or the op's default for it."""
        return self.attrs[name] if name in self.attrs else OPS[self.op].attrs[name].default

    def series(self, name: str) -> tuple[str, ...]:
        """The buffers of a repeated input or output, ``name0``, ``name1`` and so on."""
        ports = {**self.outputs, **self.inputs}
        names: list[str] = []
        while (port := f"{name}{len(names)}") in ports:
            names.append(ports[port])
        return tuple(names)

    @property
    def reads(self) -> tuple[str, ...]:
        """The buffers that it reads, those that it updates in place among them."""
        return tuple(self.inputs.values())

    @property
    def writes(self) -> tuple[str, ...]:
        """The buffers that it writes."""
        return tuple(self.outputs.values())

    def __str__(self) -> str:
        return self.text({})

    def text(self, specs: Mapping[str, WeightSpec]) -> str:
        """The node in a line, with what its weights are."""
        known = OPS[self.op].attrs if self.op in OPS else {}
        attrs = ", ".join(
            f"{key}={_short(value)}"
            for key, value in self.attrs.items()
            if key not in known or value != known[key].default
        )
        weights = ", ".join(f"{key}: {specs.get(name, name)}" for key, name in self.weights.items())
        inside = "; ".join(part for part in (_ports(self.inputs), weights, attrs) if part)
        outputs = ", ".join(self.writes)
        return f"{outputs} = {self.op}({inside})" if outputs else f"{self.op}({inside})"


def repeated(name: str, buffers: Iterable[str]) -> dict[str, str]:
    """A repeated input or output as nodes name it: ``name0``, ``name1`` and so on."""
    return {f"{name}{i}": buffer for i, buffer in enumerate(buffers)}


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _ports(inputs: Mapping[str, str]) -> str:
    """Inputs as ``name=buffer``; just the buffer where it ends in the name, and buffers of one
    prefix together: ``layer0.{k, v}``."""
    groups: dict[str, list[str]] = {}
    for name, buffer in inputs.items():
        prefix, _, last = buffer.rpartition(".")
        if last == name:
            groups.setdefault(prefix, []).append(name)
        else:
            groups[f"{name}={buffer}"] = []
    parts = list[str]()
    for key, names in groups.items():
        if not names:
            parts.append(key)
        elif not key:
            parts += names
        elif len(names) == 1:
            parts.append(f"{key}.{names[0]}")
        else:
            parts.append(f"{key}.{{{', '.join(names)}}}")
    return ", ".join(parts)
