"""A toy recurrent layer that is registered from outside, and its truth over a whole sequence.

With x the first C numbers of what the layer's attention would make queries, keys and values of:

    mean[t] = 0.9 mean[t-1] + 0.1 x[t];  y[t] = mean[t] + x[t-2] / 2

Its state has two parts, as those of gated delta nets do: ``taps`` [C, 2], the inputs x[t-1] and
x[t-2], and ``mean`` [C].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numba import carray, types
from transformers import PreTrainedModel

import model.opened
from model.architectures.decoder import Decoder, make_decoder
from model.architectures.gqa import GQA
from model.architectures.linear import Linear
from pykernels.cpu.intrin.descriptor import descriptor
from pykernels.cpu.intrin.sync import as_pointer
from pykernels.cpu.jit import task
from pykernels.cpu.words import i64
from runtime.devices.cpu.context import Context
from runtime.devices.cpu.step import BINDERS
from runtime.devices.ref.memory import RefBuffers
from runtime.devices.ref.ops import OPS as REF_OPS
from runtime.extend import register_op
from runtime.kv_cache.layout import CachePart, CacheSpec
from runtime.program import Builder, Node
from runtime.program.ops import OPS, Op, Port
from runtime.workers.job import Job

NAME, KEPT = "recurrence in a test", np.float32(0.9)
RECURRENT = (0, 2)
"""The layers that it takes the place of attention in."""

_STATE = {
    "taps": Port("float32", ("slots", "C", "2")),
    "mean": Port("float32", ("slots", "C")),
}
_BY_SEQUENCE = ("state_slots", "has_state", "query_starts", "query_lengths")
ROW = Op(
    inputs={
        "x": Port("float32", ("T", ">C")),
        **_STATE,
        **{name: Port("index", ("S",)) for name in _BY_SEQUENCE},
    },
    outputs={"out": Port("float32", ("T", "C")), **_STATE},
)


@dataclass(frozen=True)
class Recurrent:
    """The layer, in the place of an attention."""

    first: Linear
    o: Linear
    C: int
    head = None

    def cache(self, kv_dtype: str) -> CacheSpec:
        return CacheSpec(state={"taps": CachePart((self.C, 2)), "mean": CachePart((self.C,))})

    def lower(self, b: Builder, layer: str, x: str, cache: Mapping[str, str]) -> str:
        x = self.first.lower(b, f"{layer}.first", x, f"{layer}.x")
        out = b.buffer(f"{layer}.y", "T", self.C)
        inputs = {"x": x, **cache, **{name: name for name in _BY_SEQUENCE}}
        b.node(NAME, f"{layer}.recurrence", inputs, {"out": out, **cache})
        return self.o.lower(b, f"{layer}.o", out, f"{layer}.mixed")


def on_ref(m: RefBuffers, node: Node) -> None:
    slots, goes_on, starts, counts = (m.read(node.inputs[name]).tolist() for name in _BY_SEQUENCE)
    taps, mean = m.full(node.inputs["taps"]), m.full(node.inputs["mean"])
    out = m.read(node.outputs["out"])
    x = m.read(node.inputs["x"])[:, : out.shape[1]]
    for slot, past, start, count in zip(slots, goes_on, starts, counts, strict=True):
        if not past:
            taps[slot], mean[slot] = 0, 0
        for t in range(start, start + count):
            mean[slot] = float(KEPT) * mean[slot] + (1 - float(KEPT)) * x[t]
            out[t] = mean[slot] + taps[slot, :, 1] / 2
            taps[slot] = torch.stack([x[t], taps[slot, :, 0]], 1)


ARGS, args_at = descriptor(
    "recurrence",
    ("count_at", *_BY_SEQUENCE, "C", "x", "x_stride", "taps", "mean", "out", "out_stride"),
)


def on_cpu(ctx: Context, node: Node) -> list[Job]:
    """A task a sequence."""

    @task("recurrence-setup")
    def setup(address, index, worker):
        return i64(args_at(address).count_at, 0)

    @task("recurrence")
    def run(address, s, worker):
        args = args_at(address)
        C, slot, count = args.C, i64(args.state_slots, s), i64(args.query_lengths, s)
        mean = carray(as_pointer(args.mean + 4 * C * slot), (C,), types.float32)
        taps = carray(as_pointer(args.taps + 8 * C * slot), (C, 2), types.float32)
        if i64(args.has_state, s) == 0:
            mean[:] = 0
            taps[:] = 0
        for t in range(i64(args.query_starts, s), i64(args.query_starts, s) + count):
            x = carray(as_pointer(args.x + args.x_stride * t), (C,), types.float32)
            out = carray(as_pointer(args.out + args.out_stride * t), (C,), types.float32)
            for c in range(C):
                mean[c] = KEPT * mean[c] + (types.float32(1) - KEPT) * x[c]
                out[c] = mean[c] + taps[c, 1] * types.float32(0.5)
                taps[c, 1], taps[c, 0] = taps[c, 0], x[c]
        return 0

    x, out = node.inputs["x"], node.outputs["out"]
    record = ctx.record(
        ARGS,
        count_at=ctx.count_at("state_slots"),
        **{name: ctx.at(node.inputs[name]) for name in (*_BY_SEQUENCE, "taps", "mean")},
        C=ctx.tensor(out).shape[1],
        x=ctx.at(x),
        x_stride=ctx.stride(x),
        out=ctx.at(out),
        out_stride=ctx.stride(out),
    )
    return [Job(node.name, run.address, record, setup.address)]


class Truth(torch.nn.Module):
    """The layer in the place of one of transformers' attentions, over whole sequences."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.first, self.o = attention.q_proj, attention.o_proj

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        x = self.first(hidden_states)  # [1, T, C]
        T, kept = x.shape[1], float(KEPT)
        ago = torch.arange(T)[:, None] - torch.arange(T)
        weights = torch.where(ago >= 0, (1 - kept) * kept ** ago.clamp(min=0), 0.0)
        late = torch.nn.functional.pad(x, (0, 0, 2, 0))[:, :T]
        return self.o(weights @ x + late / 2), None


def make_recurrent(reference: PreTrainedModel) -> PreTrainedModel:
    """Changes some layers of transformers' model."""
    for i in RECURRENT:
        layer = reference.model.layers[i]
        layer.self_attn = Truth(layer.self_attn)
    return reference


@contextmanager
def recurrent_layers() -> Iterator[None]:
    """Models with grouped queries that are loaded meanwhile have the same layers changed."""

    def changed(*args: Any) -> Decoder:
        decoder = make_decoder(*args)
        layers = list(decoder.layers)
        for i in RECURRENT:
            attention = layers[i].attention
            if isinstance(attention, GQA):
                toy = Recurrent(attention.qkv, attention.o, attention.NH * attention.D)
                layers[i] = replace(layers[i], attention=toy)
        return replace(decoder, layers=tuple(layers))

    with patch.dict(OPS), patch.dict(REF_OPS), patch.dict(BINDERS):
        register_op(NAME, ROW, ref=on_ref, cpu=on_cpu)
        with patch.object(model.opened, "make_decoder", changed):
            yield
