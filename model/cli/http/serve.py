"""`pykernels serve`: a model behind OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pykernels.errors import PykernelsError
from pykernels.registry import requested

from ...lean_import import import_transformers
from ...server.http.settings import ServerSettings
from ...server.loading import bound_socket, told_to_wait
from ...server.start import HttpProcess
from ..shared.common import (
    Debug,
    Kernel,
    Numa,
    State,
    Threads,
    command,
    err,
    note,
    prepare_threads,
    read_key,
)
from ..shared.engine_options import engine_options
from ..shared.session import (
    CachePolicyName,
    DeferOrRules,
    DenseGib,
    Device,
    DualBatch,
    ExpertCache,
    Experts,
    GpuExperts,
    KvDtype,
    Model,
    Prefill,
    Rules,
    model_path,
    status,
)

if TYPE_CHECKING:
    from ...llm import LLM

_SERVER, _ENGINE = "The server", "The engine"


@command
def serve(
    model: Model = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8080,
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
    max_waiting: Annotated[
        int,
        typer.Option(
            min=0, help="Outputs that may wait; further ones get 429.", rich_help_panel=_SERVER
        ),
    ] = 64,
    max_ttft: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="429 where the first token is expected later.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    max_seconds: Annotated[
        float | None,
        typer.Option(metavar="S", help="After which an output ends.", rich_help_panel=_SERVER),
    ] = None,
    max_body_mb: Annotated[
        int, typer.Option(min=1, max=4096, metavar="MB", rich_help_panel=_SERVER)
    ] = 16,
    drain_seconds: Annotated[
        float,
        typer.Option(
            min=0, metavar="S", help="To end running requests at SIGTERM.", rich_help_panel=_SERVER
        ),
    ] = 30,
    log_requests: Annotated[
        bool,
        typer.Option(
            "--log-requests",
            help="Log method, path, status and seconds; never a text.",
            rich_help_panel=_SERVER,
        ),
    ] = False,
    max_batch: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Outputs run at once.", rich_help_panel=_ENGINE),
    ] = 16,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Longest prompt with its answer.",
            show_default="the model's, at most 8192",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Tokens in the KV cache.",
            show_default="what an eighth of the memory holds",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    target_itl_ms: Annotated[
        float | None,
        typer.Option(
            metavar="MS",
            help="Between two tokens, kept while prompts are read.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    rules: Rules = None,
    device: Device = "cpu",
    experts: Experts = "auto",
    gpu_experts: GpuExperts = None,
    prefill: Prefill = "auto",
    dense_gib: DenseGib = "auto",
    expert_cache: ExpertCache = "off",
    expert_cache_policy: CachePolicyName = "lfu",
    threads: Threads = None,
    kernel: Kernel = None,
    numa: Numa = "auto",
    defer: DeferOrRules = None,
    dual_batch: DualBatch = "off",
    kv_dtype: KvDtype = "bf16",
    debug: Debug = False,
) -> None:
    """Serve a model over HTTP until Ctrl-C or SIGTERM."""
    options = engine_options(
        device=device,
        rules=rules,
        experts=experts,
        gpu_experts=gpu_experts,
        prefill=prefill,
        dense_gib=dense_gib,
        expert_cache=expert_cache,
        expert_cache_policy=expert_cache_policy,
        dual_batch=dual_batch,
        defer=defer,
        kv_dtype=kv_dtype,
    )
    path = model_path(model)
    chosen_kernel, chosen_threads = requested(kernel), prepare_threads(threads)
    level = logging.DEBUG if State.debug else logging.INFO if log_requests else logging.WARNING
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("pykernels").setLevel(level)
    names = tuple(name or ()) or ("embedded" if model is None else served_name(model),)
    settings = ServerSettings(
        host=host,
        port=port,
        api_key=read_key(api_key_file),
        names=names,
        max_waiting=max_waiting,
        max_ttft=max_ttft,
        max_seconds=max_seconds,
        max_body_bytes=max_body_mb << 20,
        drain_seconds=drain_seconds,
        log_requests=log_requests,
        cors_origins=tuple(cors_origin or ()),
    )
    with ExitStack() as stack:
        bound = stack.enter_context(bound_socket(settings))
        http = None
        # A GPU waits for Python between two steps; the CPU's workers do not.
        if device != "cpu":
            http = stack.enter_context(HttpProcess(path, bound, level))
        with told_to_wait(bound):
            with status("importing torch and transformers"):
                import_transformers()
                from transformers.utils import logging as of_transformers

                from ...llm import load_engine
                from ...server.app import create_app
                from ...server.backend.host import Host
                from ...server.backend.local import LocalModel, facts_of
                from ...server.backend.messages import Begin
                from ...server.run import serve as run
                from ...server.serving.admission import AGEING_SECONDS

                of_transformers.set_verbosity_error()
                of_transformers.disable_progress_bar()
            llm = load_engine(
                path,
                threads=chosen_threads,
                kernel=chosen_kernel,
                numa=numa,
                **options,
                max_num_seqs=max_batch,
                max_model_len=max_model_len,
                kv_tokens=kv_tokens,
                target_itl_ms=target_itl_ms,
                ageing_seconds=AGEING_SECONDS,
            )
            stack.enter_context(llm)
            read_roof = _read_roof(llm)
        address, at = bound.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        for line in llm.runner.decisions:
            note(line)
        text = f"{names[0]} is served at http://{shown}:{at}/v1"

        def told() -> None:
            err().print(text, markup=False)

        if http is None:
            run(create_app(LocalModel(llm), settings, read_roof), settings, bound, told)
        else:
            begin = Begin(facts_of(llm), settings, read_roof)
            http.serve(lambda channel: Host(llm, channel, told), begin)


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
