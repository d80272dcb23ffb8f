"""`from_pretrained`: from a checkpoint folder to a model that runs, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights
from transformers.utils import is_protobuf_available, is_sentencepiece_available

from pykernels.errors import PykernelsError
from runtime.devices.gpus import gpus_of
from runtime.workers.numa import AUTO, check_numa
from runtime.workers.pool import configure_default_pool, default_pool

from .checkpoint import memory, tiktoken
from .checkpoint.config import check_ends, read_config, resolve_dtype
from .checkpoint.gguf import GGUF, find_gguf
from .checkpoint.gguf.sampling import sampling_of
from .checkpoint.gguf.tokenizer import has_tokenizer as gguf_has_tokenizer
from .checkpoint.gguf.tokenizer import tokenizer_of
from .checkpoint.load import check_kernels, load
from .checkpoint.open import open_checkpoint
from .checkpoint.plan import make_plan
from .checkpoint.progress import Callback, reporting
from .checkpoint.tensors.safetensors import read_json
from .hub import local
from .modules.inject import inject
from .modules.moe import FusedMoE, deferred_by_rules
from .modules.placement import place
from .rules import Rule, Rules, resolve_rules


def from_pretrained(
    path: str | Path,
    rules: Rules = None,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    threads: int | None = None,
    kernel: str = "auto",
    numa: str | int | None = None,
    progress: bool | Callback | None = None,
) -> PreTrainedModel:
    """Load a checkpoint on the CPU, with its routed experts on our kernels: what the engine is held
    to, and what runs where the engine cannot.

    The result is transformers' own model class with its own interface (`generate`, `forward`,
    `config`); only its MoE blocks are replaced.

    Args:
        path: folder with config.json, safetensors and their index; or a GGUF file; or a name on
            the hub, see ``hub.local``.
        rules: a YAML file, names of shipped sets ("int4,gpu"), a list of rules, or None for those
            shipped for the architecture; an empty list leaves the model as transformers has it.
        device: "cpu"; ``load_engine`` runs a model on GPUs.
        dtype: of all but the routed experts; None: the config's (bfloat16 as a rule).
        threads: workers of the experts, shared by all models of the process; None: unchanged, or
            at first one on each physical core.
        kernel: auto, amx, avx512 or generic; a rule's own `kernel` overrides it.
        numa: "auto", "off" or the number of NUMA nodes: whether the experts are split across them,
            which are the workers' too and so the same for all models; None: unchanged (auto).
        progress: None: a bar on a terminal for loads over a second; True, False, or a callable
            that gets (bytes done, bytes in all).

    Raises:
        PykernelsError: anything wrong with the checkpoint, the rules, the device or the memory,
            in one line with its hint, before a weight is loaded.
    """
    folder = local(path)
    _check_device(str(device))
    check_numa(AUTO if numa is None else numa)
    config = read_config(folder)
    chosen = resolve_dtype(dtype, config)
    parsed = resolve_rules(rules, config.model_type)
    generation = read_generation_config(folder)
    model = build_meta(config, chosen)
    fill(model, folder, parsed, kernel, chosen, progress, threads, numa)
    if generation is not None:
        model.generation_config = generation
    return model


def fill(
    model: PreTrainedModel,
    folder: Path,
    rules: Sequence[Rule],
    kernel: str,
    dtype: torch.dtype,
    progress: bool | Callback | None = None,
    threads: int | None = None,
    numa: str | int | None = None,
) -> None:
    """Inject ``rules`` into a model on the meta device, and load its checkpoint into it.

    Raises:
        PykernelsError: as ``from_pretrained``.
    """
    with open_checkpoint(folder) as checkpoint:
        inject(model, rules, kernel)
        if deferred := deferred_by_rules(model):
            raise PykernelsError(
                f"rules defer {deferred} experts, which the engine does",
                "Use load_engine (no --eager), or drop it from the rules",
            )
        for device in place(model, rules).devices:
            _check_device(device)
        _configure_workers(threads, numa)
        plan = make_plan(model, checkpoint, dtype, whole=True)
        check_kernels(model, plan)
        memory.check(memory.needed(plan, model, checkpoint, dtype))
        memory.check_nodes(plan, model, default_pool().memory)
        with reporting(progress) as report:
            load(model, plan, checkpoint, dtype, report)
    if any(isinstance(module, FusedMoE) for module in model.modules()):
        model.register_forward_pre_hook(_refuse_in_child)


def _check_device(device: str) -> None:
    if device != "cpu":
        gpus_of(device)  # raises for what is no device at all
        raise PykernelsError(
            f"transformers' own forward with our kernels runs on the CPU, not on {device}",
            "Use load_engine, or leave out --eager; or place nothing there",
        )


def _refuse_in_child(*_: object) -> None:
    """Before torch's own threads are needed, for which a forked child would wait for ever."""
    default_pool().refuse_in_child()


def read_generation_config(folder: Path) -> GenerationConfig | None:
    """The checkpoint's own settings of `generate`, in its file or a GGUF's metadata; None if it has
    none.

    Raises `PykernelsError` for settings that cannot be read.
    """
    file = folder / "generation_config.json"
    if not file.is_file():
        return _gguf_generation_config(folder)
    read_json(file)  # a clearer error for a file that is no JSON
    try:
        config = GenerationConfig.from_pretrained(folder)
    except Exception as error:  # transformers validates with several exception types of its own
        raise PykernelsError(
            f"{file} is no valid generation config: {str(error)[:300]}",
            "Download it again, or remove it",
        ) from error
    check_ends(config.eos_token_id, file)
    return config


def _gguf_generation_config(path: Path) -> GenerationConfig | None:
    file = find_gguf(path)
    fields = None if file is None else sampling_of(GGUF(file))
    if fields is None:
        return None
    try:
        return GenerationConfig(**fields)
    except Exception as error:  # as above
        raise PykernelsError(
            f"{file} wants to be sampled from as transformers cannot: {error}",
            "Convert the model again",
        ) from error


def _configure_workers(threads: int | None, numa: str | int | None) -> None:
    """Start the default pool with `threads` and `numa`, unless it already is as asked for, and has
    not stayed with the parent of a forked process."""
    if threads is not None and threads < 1:
        raise PykernelsError(f"{threads} threads were asked for", "Ask for 1 or more")
    if threads is None and numa is None and default_pool().is_here:
        return
    configure_default_pool(threads, numa=AUTO if numa is None else str(numa))


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", tiktoken.FILE)
_TWO_FILES = ("vocab.json", "merges.txt")
"""What GPT-2's tokenizer, and Qwen's, come in without a tokenizer.json."""


def has_tokenizer(path: Path) -> bool:
    """Whether a checkpoint has a tokenizer."""
    if (file := find_gguf(path)) is not None:
        return gguf_has_tokenizer(GGUF(file))
    if any((path / name).is_file() for name in _TOKENIZER_FILES):
        return True
    return all((path / name).is_file() for name in _TWO_FILES)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer; `PykernelsError` if it has none that can be read."""
    folder = Path(path)
    if (file := find_gguf(folder)) is not None:
        if not has_tokenizer(folder):
            raise PykernelsError(f"{file} has no tokenizer", "Convert the model again, with it")
        return tokenizer_of(GGUF(file))
    if not folder.is_dir():
        raise PykernelsError(
            f"There is no folder {folder}", "Give the folder of a downloaded checkpoint"
        )
    if not has_tokenizer(folder):
        raise PykernelsError(
            f"{folder} has no {', '.join(_TOKENIZER_FILES)} or {' and '.join(_TWO_FILES)}",
            "Download the tokenizer's files too",
        )
    if not (folder / "tokenizer.json").is_file():
        if (folder / tiktoken.FILE).is_file():
            return tiktoken.read_tiktoken(folder)
        if (folder / "tokenizer.model").is_file():
            _check_sentencepiece(folder)
    try:
        # AutoTokenizer takes only the tokenizer's class from it; ours also resolves aliases.
        return AutoTokenizer.from_pretrained(folder, config=read_config(folder))
    except PykernelsError:
        raise
    except PermissionError as error:
        raise PykernelsError(
            f"{error.filename} cannot be read: {error.strerror}",
            "Check its permissions and the disk",
        ) from None
    except Exception as error:  # tokenizers raises bare Exception for a broken file
        raise PykernelsError(
            f"The tokenizer of {folder} cannot be read: {error}", "Download its files again"
        ) from error


def _check_sentencepiece(folder: Path) -> None:
    """Raise `PykernelsError` if what transformers reads a tokenizer.model with is not installed.

    Without it transformers takes the file for one of tiktoken's, and asks for that package.
    """
    needed = {"sentencepiece": is_sentencepiece_available, "protobuf": is_protobuf_available}
    if missing := [name for name, available in needed.items() if not available()]:
        raise PykernelsError(
            f"{folder} has a tokenizer.model and no tokenizer.json, which takes the packages"
            f" {' and '.join(needed)} to read",
            f"pip install {' '.join(missing)}, or download tokenizer.json too",
        )


def build_meta(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model of `config` on the meta device: shapes and dtypes without weights."""
    make = partial(AutoModelForCausalLM.from_config, config, dtype=dtype)
    try:
        with torch.device("meta"), no_init_weights():
            try:
                with _ValuesOnCpu():
                    model: PreTrainedModel = make()
            except RuntimeError:  # values were mixed with what has none
                model = make()
        model.tie_weights(recompute_mapping=False)
    except Exception as error:  # each architecture raises its own types for a bad config
        raise PykernelsError(
            f"transformers cannot build a {config.model_type} language model: {str(error)[:300]}",
            "Download the file again" if _is_file(config) else "Check config.json",
        ) from error
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
    _add_biases(model, getattr(config, "stored_biases", None) or [], dtype)
    return model


class _ValuesOnCpu(TorchFunctionMode):
    """Makes tensors that have values on the CPU, inside of ``torch.device("meta")``: before torch
    computes with any on the meta device it imports its compiler, which takes 2 seconds."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if function in (torch.arange, torch.linspace, torch.tensor):
            given = {"device": "cpu"} | given
        return function(*args, **given)


def _is_file(config: PretrainedConfig) -> bool:
    """Whether a configuration is that of a GGUF file."""
    return bool(config._name_or_path) and Path(config._name_or_path).is_file()


def _add_biases(model: PreTrainedModel, names: Sequence[str], dtype: torch.dtype) -> None:
    """Biases that a GGUF file has of linears to which transformers gives none. Where there is no
    linear of that name, the load plan finds a tensor without a place."""
    modules = dict(model.named_modules())
    for name in names:
        linear = modules.get(name)
        if isinstance(linear, nn.Linear) and linear.bias is None:
            bias = torch.empty(linear.out_features, dtype=dtype, device="meta")
            linear.bias = nn.Parameter(bias)
