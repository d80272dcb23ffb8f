"""A decoder of Hugging Face's as a program: embed, layers, norm, head.

What its family does is a row of ``families``; the rest ``attention`` and ``moe`` read off the
modules.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from pykernels.cpu.attention.expanded import Expanded, expand_from
from pykernels.errors import PykernelsError
from runtime.kv_cache.layout import CachePart, CacheSpec
from runtime.program import Builder, Program, repeated
from runtime.program.sizes import ONE_TOKEN, StepSizes
from runtime.program.step_inputs import lower_sampling, step_inputs
from runtime.program.weight_spec import WeightSpec
from runtime.program.weights import WeightStore

from .attention import MLA, Attention, Rope, angles_of, eps_of, ropes_of
from .families import check_lowered, family_of
from .mixer import mixer
from .moe import Dense, MoE, experts_of
from .sandwich import SandwichLayer
from .schema import Schema
from .specs import Specs


@dataclass(frozen=True)
class Layer:
    """One layer's weights."""

    input_norm: WeightSpec
    attention: Attention
    post_norm: WeightSpec
    mlp: Dense | MoE

    @property
    def moe(self) -> MoE | None:
        """Its routed experts."""
        return self.mlp if isinstance(self.mlp, MoE) else None


@dataclass(frozen=True)
class Decoder:
    """What programs of a model are made from.

    Attributes:
        store: of its weights, which are read when a device asks for them.
        table: [V, H]; ``table_scale``: of its rows.
        logit_cap: of the logits, ``cap * tanh(x / cap)``; 0: none.
        kv_dtype: of the cache, see ``runtime.kv_cache.layout``.
    """

    name: str
    store: WeightStore
    table: WeightSpec
    layers: tuple[Layer | SandwichLayer, ...]
    norm: WeightSpec
    head: WeightSpec
    head_bias: WeightSpec | None
    eps: float
    ropes: tuple[Rope, ...]
    table_scale: float = 1.0
    logit_cap: float = 0.0
    kv_dtype: str = "bf16"

    @property
    def vocab_size(self) -> int:
        """Token ids are below."""
        return self.table.shape[0]

    @property
    def norms_experts(self) -> bool:
        """Whether a layer norms what a token's experts give before the residual stream takes it."""
        return any(isinstance(layer, SandwichLayer) for layer in self.layers)

    @property
    def head_sizes(self) -> set[tuple[int, int, int]]:
        """Numbers of a key and of a value of each kind of head, and of the key's those in E4M3:
        what attention is compiled for."""
        heads = {layer.attention.head for layer in self.layers}
        return {(dk, dv, dv if self.kv_dtype == "fp8" else 0) for dk, dv in filter(None, heads)}

    def expansions(self, T: int) -> set[Expanded]:
        """What attention with keys and values expanded is compiled for, if steps of at most T
        tokens have any."""
        latent = [each.attention for each in self.layers if isinstance(each.attention, MLA)]
        sizes = {attention.expansion for attention in latent}
        codes = self.kv_dtype == "fp8"
        return {Expanded(*each, codes) for each in sizes if expand_from(*each) <= T}

    @property
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """What each layer keeps of a sequence."""
        return tuple(layer.attention.cache(self.kv_dtype) for layer in self.layers)

    @property
    def states(self) -> tuple[str, ...]:
        """The cache's buffers that are states of sequences."""
        specs = enumerate(self.cache_specs)
        return tuple(f"layer{i}.{name}" for i, spec in specs for name in spec.state)

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in pages."""
        return sum(spec.token_bytes for spec in self.cache_specs)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state."""
        return sum(spec.state_bytes for spec in self.cache_specs)

    def caches(self, pages: int, state_slots: int = 1) -> dict[str, CachePart]:
        """The cache's buffers, of so many pages of 64 tokens and slots of states."""
        return {
            f"layer{i}.{name}": part
            for i, spec in enumerate(self.cache_specs)
            for name, part in spec.buffers(pages, state_slots).items()
        }

    def thinned(self, most: int) -> tuple[Decoder, float]:
        """See ``planning.lowerable.Lowerable``. Kinds differ in attention, window and experts."""
        layers = self.layers
        count = min(most, len(layers))
        some = tuple(layers[i] for i in _some([_kind(layer) for layer in layers], count))
        return replace(self, layers=some), len(layers) / count

    def lower(self, sizes: StepSizes = ONE_TOKEN) -> Program:
        """The program of a step of these sizes."""
        H, V = self.table.shape[1], self.table.shape[0]
        T, S, R = sizes.tokens, sizes.sequences, sizes.logits
        b = Builder(f"{self.name} T={T}", {"T": T, "S": S, "R": R})
        step_inputs(b, sizes.table_pages, states=bool(self.states))
        x = b.buffer("embedded", "T", H)
        table = {"table": self.table}
        b.node("embed", "embed", {"ids": "tokens"}, {"out": x}, table, scale=self.table_scale)
        for rope in self.ropes:
            angles = b.buffer(angles_of(rope.kind), "T", 2, *rope.frequencies.shape)
            b.node(
                "rope_table",
                f"rope.{rope.kind}" if rope.kind else "rope",
                {"positions": "positions"},
                {"out": angles},
                {"frequencies": rope.frequencies},
                scale=rope.scale,
            )
        add: list[str] = []
        for i, layer in enumerate(self.layers):
            name = f"layer{i}"
            parts = layer.attention.cache(self.kv_dtype)
            cache = {
                part: b.buffer(f"{name}.{part}", *of.shape, dtype=of.dtype, kind="cache")
                for part, of in parts.buffers(sizes.pages, sizes.state_slots).items()
            }
            with b.marked(layer=i):
                if isinstance(layer, SandwichLayer):
                    x = layer.lower(b, name, x, cache)
                    continue
                x, normed = self._norm(b, f"{name}.input_norm", layer.input_norm, x, add)
                with b.marked(role="attention"):
                    add = [layer.attention.lower(b, name, normed, cache)]
                x, normed = self._norm(b, f"{name}.post_norm", layer.post_norm, x, add)
                add = layer.mlp.lower(b, name, normed)
        last = b.buffer("normed", "R", H)
        b.node(
            "rms_norm",
            "norm",
            {"x": x, **repeated("add", add), "rows": "logits_indices"},
            {"out": last},
            {"weight": self.norm},
            eps=self.eps,
        )
        b.buffer("logits", "R", V, kind="output")
        head = {"weight": self.head, "bias": self.head_bias}
        b.node("linear", "lm_head", {"x": last}, {"out": "logits"}, head)
        if self.logit_cap:
            logits = {"x": "logits"}
            b.node("softcap", "logit_cap", logits, logits, cap=self.logit_cap)
        lower_sampling(b, "logits", V)
        return b.build()

    def _norm(
        self, b: Builder, name: str, weight: WeightSpec, x: str, add: list[str]
    ) -> tuple[str, str]:
        """The residual stream with ``add``, and its norm."""
        normed = b.buffer(f"{name}.out", "T", *weight.shape)
        total = b.buffer(f"{name}.sum", "T", *weight.shape) if add else x
        b.node(
            "rms_norm",
            name,
            {"x": x, **repeated("add", add)},
            {"out": normed, **({"sum": total} if add else {})},
            {"weight": weight},
            eps=self.eps,
        )
        return total, normed


def cache_token_bytes(model: PreTrainedModel, kv_dtype: str = "bf16") -> int:
    """Bytes that one token's keys and values take in the cache.

    Raises:
        PykernelsError: no such ``kv_dtype``.
    """
    inner: Any = model.model
    mixers = [mixer(layer) for layer in inner.layers]
    return sum(kind.cached(module, kv_dtype).token_bytes for _, module, kind in mixers)


def cache_state_bytes(model: PreTrainedModel) -> int:
    """Bytes of one sequence's states, whatever its length."""
    mixers = [mixer(layer) for layer in model.model.layers]
    return sum(kind.cached(module, "bf16").state_bytes for _, module, kind in mixers)


def check_heads(sizes: Iterable[tuple[int, int, int]]) -> None:
    """Raises PykernelsError for ``Decoder.head_sizes`` that the CPU's attention cannot have."""
    for dk, dv, _ in sizes:
        if dk % 16 or dv % 16:
            raise PykernelsError(
                f"the engine's attention has no heads of {dk} numbers, with values of {dv}, only"
                " of multiples of 16",
                "Use --eager",
            )


def make_decoder(
    model: PreTrainedModel, schema: Schema, store: WeightStore, kv_dtype: str = "bf16"
) -> Decoder:
    """What programs of a model are made from; no weight is read.

    Args:
        model: loaded, or on the meta device: it says what is computed.
        schema: of its weights; ``store``: has them.
        kv_dtype: of the cache.

    Raises:
        PykernelsError: a family that is not lowered; a weight that is missing or of another shape.
    """
    config: Any = model.config
    check_lowered(config)
    inner, specs = model.model, Specs(schema)
    family = family_of(config)
    names = family.names
    embedding = "model.embed_tokens.weight"
    table = specs.table(embedding)
    if not config.tie_word_embeddings:
        head = specs.matrix("lm_head.weight")
    else:
        head = table if table.fmt != "bf16" else specs.matrix(embedding)
        head = head if head == table else replace(head, name="lm_head.weight")  # if converted
    return Decoder(
        name=config.model_type,
        store=store,
        table=table,
        layers=tuple(_layer(model, i, specs) for i in range(len(inner.layers))),
        norm=specs.vector(f"model.{names.norm}.weight", family.norm_change),
        head=head,
        head_bias=specs.tensor("lm_head.bias"),
        eps=eps_of(getattr(inner, names.norm)),
        ropes=ropes_of(getattr(inner, names.rotary), config, store),
        table_scale=float(getattr(inner.embed_tokens, "scalar_embed_scale", 1.0)),
        logit_cap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
        kv_dtype=kv_dtype,
    )


def _layer(model: PreTrainedModel, i: int, specs: Specs) -> Layer | SandwichLayer:
    """The weights of one layer."""
    layer, name = model.model.layers[i], f"model.layers.{i}"
    family = family_of(model.config)
    if hasattr(layer, "pre_feedforward_layernorm"):
        return SandwichLayer.make(layer, name, specs, family, model.config)
    names, change = family.names, family.norm_change
    block, within = getattr(layer, names.mlp), f"{name}.{names.mlp}"
    mlp: Dense | MoE
    if experts_of(block) is not None:
        mlp = MoE.make(block, within, specs, family)
    else:
        mlp = Dense.make(within, specs, names)
    leaf, module, kind = mixer(layer)
    return Layer(
        input_norm=specs.vector(f"{name}.{names.input_norm}.weight", change),
        attention=kind.make(module, f"{name}.{leaf}", specs, family),
        post_norm=specs.vector(f"{name}.{names.post_norm}.weight", change),
        mlp=mlp,
    )


def _kind(layer: Layer | SandwichLayer) -> tuple[str, int, bool]:
    """What makes layers cost alike: mixer, window, and whether experts are behind it."""
    window = getattr(layer.attention, "window", 0)
    return type(layer.attention).__name__, window, layer.moe is not None


def _some(kinds: Sequence[Hashable], count: int) -> list[int]:
    """So many places among layers, of each kind as near to its part of all as can be."""
    places = {kind: [i for i, own in enumerate(kinds) if own == kind] for kind in kinds}
    wanted = {kind: count * len(own) / len(kinds) for kind, own in places.items()}
    parts = {kind: int(share) for kind, share in wanted.items()}
    most_left = sorted(wanted, key=lambda kind: parts[kind] - wanted[kind])
    for kind in most_left[: count - sum(parts.values())]:
        parts[kind] += 1
    return sorted(
        own[(2 * i + 1) * len(own) // (2 * parts[kind])]
        for kind, own in places.items()
        for i in range(parts[kind])
    )
