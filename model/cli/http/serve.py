"""`pykernels serve`: a model behind OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Annotated

import typer

from pykernels.errors import PykernelsError
from runtime.engine.scheduling.config import EngineConfig
from runtime.planning.config import CHOSEN, ExecutionConfig

from ...server.http.settings import ROUTER, ServerSettings
from ...server.loading import bound_socket, told_to_wait
from ...server.start import HttpProcess
from ...startup.lean_import import import_transformers
from ..shared.common import Debug, State, command, err, note, read_key
from ..shared.execution import opened_with
from ..shared.model_options import Model, Rules
from ..shared.options import Choose
from ..shared.session import OFF_HINT, status
from .router import check_unused, nodes_of, route, shared

if TYPE_CHECKING:
    from ...llm import LLM

_WATCH_SECONDS = 1.0
_SERVER, _ENGINE = "The server", "The engine"
_REQUESTS = Choose(names={"max_body_bytes": "max_body_mb"}, panel=_SERVER)
_SIZES = Choose(names={"max_num_seqs": "max_batch"}, panel=_ENGINE)


@command
def serve(
    settings: Annotated[ServerSettings, _REQUESTS],
    engine: Annotated[EngineConfig, _SIZES],
    execution: Annotated[ExecutionConfig, Choose(defaults={"device": CHOSEN})],
    model: Model = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            help="The model's name in requests; may be repeated.", show_default="that of DIR"
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Its first line is the key that requests must bring.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="A web page whose scripts may use the server; may be repeated.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    prefill_node: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]URL",
            help="Of a router: a server that reads prompts; may be repeated.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    decode_node: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]URL",
            help="Of a router: a server that writes answers; may be repeated.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    rules: Rules = None,
    debug: Debug = False,
) -> None:
    """Serve a model over HTTP until Ctrl-C or SIGTERM."""
    nodes = nodes_of(settings.role, prefill_node or (), decode_node or ())
    if settings.role == ROUTER:
        check_unused(engine, execution, rules)
    elif settings.role is not None:
        engine = shared(engine, settings)
    path, execution = opened_with(execution, model, rules)
    settings = replace(
        settings,
        api_key=read_key(api_key_file),
        names=tuple(name or ()) or ("embedded" if model is None else served_name(model),),
        cors_origins=tuple(cors_origin or ()),
    )
    level = _log_level(settings)
    with ExitStack() as stack:
        bound = stack.enter_context(bound_socket(settings))
        text = f"{settings.names[0]} is served at {_url(bound)}"

        def told() -> None:
            err().print(text, markup=False)

        if settings.role == ROUTER:
            route(path, nodes, settings, bound, told)
            return
        http = None
        # A GPU waits for Python between two steps; the CPU's workers do not.
        if execution.device != "cpu":
            http = stack.enter_context(HttpProcess(path, bound, level))
        with told_to_wait(bound):
            with status("importing torch and transformers"):
                import_transformers()
                from transformers.utils import logging as of_transformers

                from ...load import load_engine
                from ...server.app import create_app
                from ...server.backend.host import Host
                from ...server.backend.local import LocalModel, facts_of
                from ...server.backend.messages import Begin
                from ...server.run import serve as run
                from ...server.serving.admission import AGEING_SECONDS

                of_transformers.set_verbosity_error()
                of_transformers.disable_progress_bar()
            engine = replace(engine, ageing_seconds=AGEING_SECONDS)
            llm = stack.enter_context(load_engine(path, rules, execution=execution, engine=engine))
            read_roof = _read_roof(llm)
        for line in llm.decisions:
            note(line)
        threading.Thread(target=_watch_speed, args=(llm,), name="speed", daemon=True).start()
        if http is None:
            run(create_app(LocalModel(llm), settings, read_roof), settings, bound, told)
        else:
            begin = Begin(facts_of(llm), settings, read_roof)
            http.serve(lambda channel: Host(llm, channel, told), begin)


def _watch_speed(llm: LLM) -> None:
    """Notes, once, that the first decode steps are not as fast as predicted."""
    while llm.engine.healthy and llm.engine.pace is None:
        time.sleep(_WATCH_SECONDS)
    speed = llm.check_speed() if llm.engine.healthy else None
    if speed is not None and speed.is_off:
        note(f"{speed.line}: {OFF_HINT}")


def _log_level(settings: ServerSettings) -> int:
    """The level of this program's log, which is set up."""
    requests = logging.INFO if settings.log_requests else logging.WARNING
    level = logging.DEBUG if State.debug else requests
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("pykernels").setLevel(level)
    return level


def _url(bound: socket) -> str:
    address, port = bound.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    return f"http://{shown}:{port}/v1"


def served_name(model: Path) -> str:
    """What requests call a model: its folder or file, or its name on the hub."""
    return model.resolve().stem if model.exists() else str(model)


def _read_roof(llm: LLM) -> float | None:
    """GB/s that the workers read at most, measured today; None beside a model that fills the
    memory."""
    from runtime.profiling.roofline import kept_read_roof

    try:
        with status("measuring the read roof"):
            return kept_read_roof(llm.pool.threads, lambda: llm.pool)
    except PykernelsError as error:
        note(f"/metrics has no share of the read roof: {error}")
        return None
