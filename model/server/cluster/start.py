"""A router finds its nodes, and what they serve."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import httpx2

from pykernels.errors import PykernelsError

from ...checkpoint.config import read_config
from ...load import texts_of
from ...text.settings import engine_settings
from ..backend.interface import ConfigFacts, DevicePart, ModelFacts
from ..http.settings import DECODE, PREFILL, ServerSettings
from ..serving.admission import AGEING_SECONDS
from .addresses import Address
from .node import TIMEOUT, Node, NodeLost, facts_of
from .protocol import PATH, NodeFacts
from .router import ClusterModel

_POLL_SECONDS = 0.5


def cluster_of(
    folder: Path,
    addresses: Sequence[Address],
    settings: ServerSettings,
    tell: Callable[[str], object],
) -> ClusterModel:
    """The model of ``folder`` on these nodes, once all of them are there.

    Args:
        tell: called with what it waits for.

    Raises:
        PykernelsError: something else is at an address, or the nodes do not belong together.
    """
    config = read_config(folder)
    generation, tokenizer, eos = texts_of(folder, config)
    nodes = [Node(address, _awaited(address, settings.api_key, tell)) for address in addresses]
    _check_same(nodes, config.model_type)
    check_ways(nodes, tell)
    seats = sum(node.facts.max_num_seqs for node in nodes if node.role == DECODE)
    first, vocab_size = nodes[0].facts, nodes[0].facts.vocab_size
    least = {
        name: min(getattr(node.facts, name) for node in nodes)
        for name in ("longest", "max_model_len", "num_pages")
    }
    facts = ModelFacts(
        config=ConfigFacts(config.model_type, getattr(config, "bos_token_id", None)),
        settings=engine_settings(generation, eos, vocab_size, tokenizer is not None),
        vocab_size=vocab_size,
        eos_token_ids=frozenset(eos),
        max_num_seqs=seats,
        ageing_seconds=AGEING_SECONDS,
        page_size=first.page_size,
        routed_layers=first.routed_layers,
        workers=0,
        devices=(),
        parts=tuple(part for node in nodes for part in _parts(node)),
        kv_model=first.kv_model,
        **least,
    )
    return ClusterModel(nodes, facts, tokenizer, settings.api_key, settings.max_ttft)


def _awaited(address: Address, key: str | None, tell: Callable[[str], object]) -> NodeFacts:
    """What a node is, which may still load its model."""
    headers, told = {} if key is None else {"Authorization": f"Bearer {key}"}, False
    with httpx2.Client(headers=headers, timeout=TIMEOUT) as http:
        while True:
            try:
                return facts_of(address, http.get(address.url + PATH))
            except (NodeLost, httpx2.HTTPError) as error:
                if not told:
                    tell(f"waiting for the {address.role} node {address.name}: {error}")
                told = True
            time.sleep(_POLL_SECONDS)


def _check_same(nodes: Sequence[Node], model_type: str) -> None:
    """Raises PykernelsError unless the nodes' pages are of one model, the router's."""
    first = nodes[0]
    for node in nodes:
        if node.facts.model_type != model_type:
            raise PykernelsError(
                f"the {node.role} node {node.name} has a model of type {node.facts.model_type},"
                f" and this router one of type {model_type}",
                "Give all of them one --model",
            )
        if node.facts.kv_model != first.facts.kv_model:
            raise PykernelsError(
                f"the nodes {first.name} and {node.name} cannot read each other's pages",
                "Give both one --kv-dtype and --defer, and one --model whose files have the same"
                " times: from the hub, or copied with cp -p or rsync -t",
            )


def check_ways(nodes: Sequence[Node], tell: Callable[[str], object]) -> None:
    """Tells by which ways prompts go from nodes that read them to those that write answers.

    Raises:
        PykernelsError: there is none between two of them, or one cannot be reached.
    """
    near = [n for n in nodes if n.facts.peer is not None and n.facts.peer.is_local]
    far = [n for n in nodes if n.facts.peer is not None and not n.facts.peer.is_local]
    if near and far and near[0].facts.peer is not None:
        raise PykernelsError(
            f"the node {near[0].name} offers its pages at {near[0].facts.peer.session}, which only"
            f" its own machine reaches, and {far[0].name} is on another one",
            "Give it its machine's address as --kv-transfer",
        )
    pairs: dict[str, list[str]] = {}
    for one, other in product(*([n for n in nodes if n.role == r] for r in (PREFILL, DECODE))):
        way = next((way for way in one.facts.ways if way in other.facts.ways), None)
        if way is None:
            have = [", ".join(node.facts.ways) or "none" for node in (one, other)]
            raise PykernelsError(
                f"the nodes {one.name} and {other.name} have no way in common to hand over pages:"
                f" {one.name} has {have[0]}, {other.name} has {have[1]}",
                "Install pykernels[mooncake] on both, or give both one --kv-store or --kv-disk",
            )
        pairs.setdefault(way, []).append(f"{one.name} to {other.name}")
    for way, between in pairs.items():
        tell(f"pages go by {way}: {', '.join(between)}")


def _parts(node: Node) -> list[DevicePart]:
    return [replace(part, device=f"{node.name} {part.device}") for part in node.facts.parts]
