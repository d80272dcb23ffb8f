"""`pykernels serve --role`: one server of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING

from pykernels.errors import PykernelsError
from runtime.engine.scheduling.config import EngineConfig
from runtime.planning.config import CHOSEN, ExecutionConfig
from runtime.planning.option import SettingError

from ...server.http.settings import ROUTER, ServerSettings
from ...server.loading import told_to_wait
from ...startup.lean_import import import_transformers
from ..shared.common import note
from ..shared.session import status

if TYPE_CHECKING:
    from ...server.cluster.addresses import Address


def nodes_of(role: str | None, prefill: Sequence[str], decode: Sequence[str]) -> list[Address]:
    """The nodes of a router; none of another server.

    Raises:
        PykernelsError: a router without nodes, nodes without a router, or no addresses.
    """
    if role == ROUTER:
        from ...server.cluster.addresses import addresses

        return addresses(prefill, decode)
    if prefill or decode:
        option = "--prefill-node" if prefill else "--decode-node"
        raise PykernelsError(f"{option} of a server that is no router", "Give --role router")
    return []


def shared(engine: EngineConfig, settings: ServerSettings) -> EngineConfig:
    """The settings of a node: where nobody says how it hands pages to others, by Mooncake's
    Transfer Engine if that is here.

    Raises:
        PykernelsError: it shares nothing with other nodes.
    """
    from runtime.kv_tiers.transfer.endpoint import check_transfer, why_not

    if engine.kv_transfer is None and engine.kv_store is None and why_not() is None:
        host = settings.host
        try:
            check_transfer(host)
        except PykernelsError as error:
            raise PykernelsError(
                error.cause, "Give this machine's address as --kv-transfer, or --kv-transfer off"
            ) from error
        engine = replace(engine, kv_transfer=host)
    if not (engine.kv_store or engine.kv_disk or engine.transfer_host):
        why = "" if engine.kv_transfer == "off" else f": {why_not()}"
        raise PykernelsError(
            f"--role {settings.role} without anything that the nodes share{why}",
            "Install pykernels[mooncake] everywhere, or give all of them one --kv-store"
            " mooncake://HOST:PORT, or one --kv-disk DIR",
        )
    return replace(engine, kv_shared=True)


def check_unused(engine: EngineConfig, execution: ExecutionConfig, rules: Path | None) -> None:
    """Raises SettingError where a router is given a setting of an engine, which it has not."""
    unset_engine, unset_execution = EngineConfig(), ExecutionConfig(device=CHOSEN)
    for given, unset in ((engine, unset_engine), (execution, unset_execution)):
        for each in fields(given):
            value = getattr(given, each.name)
            if value != getattr(unset, each.name):
                raise SettingError(each.name, value, "Give it to the nodes", "of a router")
    if rules is not None:
        raise PykernelsError("--rules of a router, which has no weights", "Give it to the nodes")


def route(
    path: Path,
    nodes: Sequence[Address],
    settings: ServerSettings,
    bound: socket,
    told: Callable[[], object],
) -> None:
    """Serves a model on nodes; see ``server.run.serve``."""
    with told_to_wait(bound):
        with status("importing transformers"):
            import_transformers()
            from transformers.utils import logging as of_transformers

            from ...server.app import create_app
            from ...server.cluster.start import cluster_of
            from ...server.run import serve

            of_transformers.set_verbosity_error()
        app = create_app(cluster_of(path, nodes, settings, note), settings)
    serve(app, settings, bound, told)
