"""What `generate` and `chat` have in common: their options, and a model that streams to stdout."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pykernels.errors import PykernelsError
from pykernels.registry import requested
from runtime.workers.numa import check_numa

from ... import EMBEDDED
from ...hub import local
from ...lean_import import import_transformers
from .common import err, note, prepare_threads

if TYPE_CHECKING:
    from ...engine_stream import EngineStream
    from ...llm import LLM
    from ...text.generate import GenerationStats, GenerationStream

Model = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR|FILE.gguf|OWNER/NAME",
        help="Checkpoint, or its name on the Hugging Face hub (a GGUF file's: OWNER/NAME:Q4_K_M).",
        show_default="the embedded model",
    ),
]
Rules = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE|SET,SET",
        help="Injection rules: a file, or shipped ones (int4, gpu ...) before the architecture's."
        " KTransformers' names of classes and arguments are accepted.",
        show_default="those of the architecture",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="cpu|cuda:0|cuda:0,cuda:1",
        help="Where attention, dense layers and shared experts run; several GPUs have a part of the"
        " layers each.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="bfloat16|float16|float32",
        help="Of the dense part.",
        show_default="the config's",
    ),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, metavar="N", help="Stop after N tokens.")]
Temperature = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        metavar="T",
        help="0 takes the likeliest token.",
        show_default="the checkpoint's, else 0.8",
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        metavar="P",
        help="Sample from this much probability.",
        show_default="the checkpoint's, else 0.95",
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="K",
        help="Sample from the K likeliest tokens; 0: all.",
        show_default="the checkpoint's, else 0",
    ),
]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="The same seed gives the same text.")]


Eager = Annotated[
    bool,
    typer.Option(
        "--eager",
        help="Hugging Face's own forward with our experts, on the CPU, instead of the engine; what"
        " --dtype uses anyway.",
    ),
]

_DEFER = (
    "Experts of a written token, the least-weighted, whose output joins one layer later."
    " Another text, but the same beside any others; prompts reuse no cached pages of answers."
)
Defer = Annotated[str, typer.Option(metavar="N|auto|off", help=_DEFER)]
DeferOrRules = Annotated[
    str | None,
    typer.Option(metavar="N|auto|off", help=_DEFER, show_default="what rules say, else off"),
]


DualBatch = Annotated[
    str,
    typer.Option(
        "--dual-batch",
        metavar="auto|on|off",
        help="Decode steps of several sequences in two lanes: a GPU computes the attention of one"
        " while the CPU computes the experts of the other.",
    ),
]


def dual_batch_of(choice: str, device: str) -> bool | str:
    """What `EngineConfig` calls a choice; `PykernelsError` for one that the device has not."""
    known: dict[str, bool | str] = {"auto": "auto", "on": True, "off": False}
    if choice not in known:
        raise PykernelsError(f"--dual-batch {choice}", "Give auto, on or off")
    if choice == "on" and device == "cpu":
        raise PykernelsError("--dual-batch on without a GPU", "Add --device cuda:0")
    return known[choice]


Prefill = Annotated[
    str,
    typer.Option(
        metavar="auto|cpu|split|stream",
        help="With --device cuda:0, where the experts of prompts are computed that lie in main"
        " memory: there (cpu), on the GPU, to which they cross (stream), or some here and some"
        " there (split); auto: by measured rates.",
    ),
]


def check_prefill(choice: str, device: str, eager: bool = False) -> None:
    """`PykernelsError` for a choice that there is not, or not here."""
    from runtime.engine.scheduling.config import PREFILL

    if choice not in PREFILL:
        raise PykernelsError(f"--prefill {choice}", f"Give {', '.join(PREFILL)}")
    if choice != "auto" and device == "cpu":
        raise PykernelsError(f"--prefill {choice} without a GPU", "Add --device cuda:0")
    if choice != "auto" and eager:
        raise PykernelsError("--prefill is for the engine", "Leave out --eager and its kin")


KvDtype = Annotated[
    str,
    typer.Option(
        "--kv-dtype",
        metavar="bf16|fp8",
        help="Keys and values in the cache; fp8 halves its memory.",
    ),
]

Experts = Annotated[
    str,
    typer.Option(
        metavar="auto|cpu|gpu",
        help="Where routed experts are with --device cuda:0; auto: on the GPU if all fit.",
    ),
]

GpuExperts = Annotated[
    str | None,
    typer.Option(
        metavar="N|auto|FILE",
        help="Experts of each layer that a GPU computes too: N, what fits, or by a profile.",
        show_default="none",
    ),
]


ExpertCache = Annotated[
    str,
    typer.Option(
        metavar="N|auto|off",
        help="Slots of each layer on the GPU for the experts that the routers choose most of late,"
        " beside those on the CPU: N, or what fits.",
    ),
]

CachePolicyName = Annotated[
    str,
    typer.Option(
        "--expert-cache-policy",
        metavar="lfu|lru|lfu-fixed|lru-fixed",
        help="What the slots keep: what was chosen most often, or last; fixed: as many swaps in"
        " each layer.",
    ),
]


DenseGib = Annotated[
    str,
    typer.Option(
        metavar="GIB|auto",
        help="GPU memory for the dense weights of layers; those of the others cross in every step."
        " auto: all that fit.",
    ),
]


def dense_gib_of(choice: str, device: str, eager: bool = False) -> float | str:
    """What `EngineConfig` calls a choice; `PykernelsError` for one that there is not, or not
    here."""
    if choice == "auto":
        return choice
    try:
        found = float(choice)
    except ValueError:
        found = -1.0
    if not 0 <= found < math.inf:
        raise PykernelsError(f"--dense-gib {choice}", "Give a number of GiB, or auto")
    if device == "cpu":
        raise PykernelsError(f"--dense-gib {choice} without a GPU", "Add --device cuda:0")
    if eager:
        raise PykernelsError("--dense-gib is for the engine", "Leave out --eager and its kin")
    return found


def expert_cache_of(choice: str, device: str, eager: bool = False) -> int | str:
    """What `EngineConfig` calls a choice; `PykernelsError` for one that there is not, or not
    here."""
    if choice not in ("auto", "off") and not choice.isdecimal():
        raise PykernelsError(f"--expert-cache {choice}", "Give a number of slots, auto or off")
    if choice != "off" and device == "cpu":
        raise PykernelsError(f"--expert-cache {choice} without a GPU", "Add --device cuda:0")
    if choice != "off" and eager:
        raise PykernelsError("--expert-cache is for the engine", "Leave out --eager and its kin")
    return int(choice) if choice.isdecimal() else choice


def check_experts(experts: str, gpu_experts: str | None, beside_gpu: bool) -> None:
    """`PykernelsError` for experts on a GPU where there is none."""
    if experts != "auto" and not beside_gpu:
        raise PykernelsError(
            f"--experts {experts} is for the engine with a GPU", "Add --device cuda:0"
        )
    if gpu_experts is not None and not beside_gpu:
        raise PykernelsError("--gpu-experts without a GPU", "Add --device cuda:0")


def model_path(model: Path | None) -> Path:
    """Where the model is, see ``hub.local``; call it before torch is imported, so that a mistyped
    name is refused at once, and before `prepare_threads`, which hides the bars of a download."""
    return EMBEDDED if model is None else local(model)


class Session:
    """A loaded model and tokenizer with the options of a run: on the engine, or eagerly."""

    def __init__(
        self,
        model: Path | None,
        rules: Path | None,
        device: str,
        dtype: str | None,
        threads: int | None,
        kernel: str | None,
        numa: str,
        eager: bool,
        prompt: str | None = None,
        defer: str | None = None,
        kv_dtype: str = "bf16",
        gpu_experts: str | None = None,
        experts: str = "auto",
        prefill: str = "auto",
        dense_gib: str = "auto",
        expert_cache: str = "off",
        expert_cache_policy: str = "lfu",
        **sampling: Any,
    ) -> None:
        """Check the options and that `prompt` fits the context, then load.

        `sampling`: the other arguments of `generate_stream`; temperature, top_p and top_k that are
        None are the checkpoint's.
        """
        chosen_kernel, path = requested(kernel), model_path(model)
        chosen_threads = prepare_threads(threads)
        check_numa(numa)
        with status("importing torch and transformers"):
            import_transformers()
            from transformers.utils import logging

            from ... import load_tokenizer
            from ...architectures.families import why_not
            from ...checkpoint.config import read_config
            from ...opened import engine_device
            from ...pretrained import read_generation_config
            from ...rules import resolve_rules
            from ...text.generate import check_options
            from ...text.settings import with_defaults

            logging.set_verbosity_error()
            logging.disable_progress_bar()
        self.sampling = with_defaults(sampling, read_generation_config(path))
        check_options(**self.sampling)
        self.tokenizer = load_tokenizer(path)
        wanted = 0 if prompt is None else self._check(path, prompt)
        model_type = read_config(path).model_type
        parsed = resolve_rules(rules, model_type)
        device = engine_device(device, parsed, model_type)
        beside_gpu, eager = device != "cpu", eager or dtype is not None
        if eager and beside_gpu:
            raise PykernelsError(
                f"--eager, and --dtype with it, runs on the CPU, not on {device}",
                "Leave it out, or --device and rules that name a GPU",
            )
        check_experts(experts, gpu_experts, beside_gpu)
        if eager and defer not in (None, "off"):
            raise PykernelsError("--defer is for the engine", "Leave out --eager and its kin")
        if eager and kv_dtype != "bf16":
            raise PykernelsError("--kv-dtype is for the engine", "Leave out --eager and its kin")
        check_prefill(prefill, device, eager)
        slots = expert_cache_of(expert_cache, device, eager)
        dense = dense_gib_of(dense_gib, device, eager)
        if not (eager or beside_gpu) and (reason := why_not(read_config(path))):
            note(f"the engine cannot run this model, so it runs eagerly: {reason}")
            eager = True
        self.llm: LLM | None = None
        if eager:
            from ... import from_pretrained

            self.model = from_pretrained(
                path,
                rules=parsed,
                dtype=dtype,
                threads=chosen_threads,
                kernel=chosen_kernel,
                numa=numa,
            )
        else:
            from ...llm import load_engine

            self.llm = load_engine(
                path,
                rules=parsed,
                threads=chosen_threads,
                kernel=chosen_kernel,
                at_least=wanted,
                max_num_seqs=1,
                defer=defer,
                kv_dtype=kv_dtype,
                device=device,
                experts=experts,
                gpu_experts=gpu_experts,
                prefill=prefill,
                dense_gib=dense,
                expert_cache=slots,
                expert_cache_policy=expert_cache_policy,
                numa=numa,
            )
            if gpu_experts is not None:
                layers = self.llm.gpu_experts
                count = sum(map(len, layers.values()))
                note(f"{count} experts of {len(layers)} layers are on {device} too")
            for line in self.llm.runner.decisions:
                note(line)
            if (slots_there := self.llm.runner.slots) is not None:
                sizes = [spec.shape[0] for spec in slots_there.specs]
                note(f"{sum(sizes)} slots for experts of {len(sizes)} layers are on {device}")

    def _check(self, path: Path, prompt: str) -> int:
        """Check that the prompt fits, before minutes are spent on loading a large model; tokens of
        it and its continuation."""
        import torch

        from ...checkpoint.config import read_config
        from ...pretrained import build_meta
        from ...text.prompt import check_context, encode

        shapes = build_meta(read_config(path), torch.bfloat16)
        tokens = len(encode(shapes, self.tokenizer, prompt))
        check_context(shapes, tokens, self.sampling["max_new_tokens"])
        return tokens + int(self.sampling["max_new_tokens"])

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation."""
        from ...text.prompt import encode_chat

        return encode_chat(self.llm or self.model, self.tokenizer, messages)

    def write(self, prompt: str | list[int], echo: bool = False) -> tuple[str, GenerationStats]:
        """Stream the continuation of `prompt` to stdout; returns it with its figures.

        With `echo` a text is written first, once it is known to fit.
        """
        stream = self._stream(prompt)
        text = prompt if echo and isinstance(prompt, str) else ""
        answer = ""
        try:
            with status("reading the prompt"):  # the first run compiles the kernels here, too
                answer = next(stream, "")
            sys.stdout.write(text + answer)
            sys.stdout.flush()
            for piece in stream:
                sys.stdout.write(piece)
                sys.stdout.flush()
                answer += piece
        finally:
            stream.close()
            if answer:
                sys.stdout.write("\n")
                sys.stdout.flush()
        return answer, stream.stats

    def _stream(self, prompt: str | list[int]) -> GenerationStream | EngineStream:
        if self.llm is None:
            from ...text.generate import generate_stream

            return generate_stream(self.model, self.tokenizer, prompt, **self.sampling)
        from ...engine_stream import engine_stream

        return engine_stream(self.llm, prompt, **self.sampling)


def summary(stats: GenerationStats, roof: float | None) -> str:
    """The line under a generated text.

    Args:
        stats: what `generate_stream` measured.
        roof: GB/s that this machine's cores read from memory.
    """
    parts = [
        f"{stats.prompt_tokens} prompt token{'s' * (stats.prompt_tokens > 1)}",
        f"prefill {stats.prefill_tokens_per_second:.0f} tok/s",
        f"decode {stats.decode_tokens_per_second:.1f} tok/s",
    ]
    if stats.read_seconds > 0:
        read = f"{stats.reads} {stats.read_gb_per_second:.2f} GB/s"
        if roof:
            share = 100 * stats.read_gb_per_second / roof
            read += f" ({share:.0f} % of the {roof:.0f} GB/s read roof)"
        parts.append(read)
    return " · ".join(parts)


@contextmanager
def status(what: str) -> Iterator[None]:
    """A spinner on stderr meanwhile; nothing if stderr is no terminal."""
    with err().status(f"{what} …", spinner_style="dim"):
        yield


def check_stdin() -> None:
    """Raise `PykernelsError` if the program was started without a stdin."""
    if sys.stdin is None:
        raise PykernelsError("stdin is closed", "Send it some text, or start it in a terminal")


def read_stdin(read: Callable[[], str]) -> str:
    """The result of `read`, which reads stdin; `PykernelsError` for bytes of another encoding."""
    try:
        return read()
    except UnicodeDecodeError as error:
        from ...text.prompt import NOT_UTF8

        raise PykernelsError(f"stdin is no {error.encoding} text", NOT_UTF8) from None
