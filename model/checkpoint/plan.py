"""The load plan: which stored tensor goes where in the model, made from names and shapes.

Only names, shapes and dtypes are read here, so every mismatch is an error before the first weight
is loaded. These stored layouts are read:

====================================================  ==========================================
stored                                                as in
====================================================  ==========================================
``X.experts.E.{gate,up,down}_proj.weight``            DeepSeek, Qwen, GLM (also in FP8)
``X.experts.E.{w1,w3,w2}.weight``                     Mixtral (gate, up, down)
``X.experts.{gate_up,down}_proj`` [E, 2 I, H], ...    transformers' own fused parameters
the same [E, H, 2 I], ... and ``*_bias``              gpt-oss, gate and up in turns
``*.weight`` float8_e4m3fn + ``*.weight_scale_inv``   DeepSeek's FP8, one scale a 128x128 block
``*.weight`` float8_e4m3fn or int8 + ``*_scale``      see `compressed_tensors`
``*.weight_packed`` + ``*.weight_scale``, ...         likewise, int4
``*.qweight`` + ``*.qzeros`` + ``*.scales``           see `awq` and `gptq`
``*.weight`` uint8 + ``*_scale`` + ``*_scale_2``, ..   see `nvfp4`
``X.experts.gate_up_proj_blocks``, ``_scales``, ...   see `mxfp4`
``blk.L.ffn_{gate,up,down}_exps.weight`` [E, N, K]    GGUF, see `gguf.names`
``blk.L.ffn_gate_up_exps.weight`` [E, 2 I, H]         GGUF, gate first
``blk.L.attn_qkv.weight``                             GGUF, see `gguf.fused`
====================================================  ==========================================
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pykernels.errors import PykernelsError
from pykernels.shapes import MoEShape

from ..modules.moe import FusedMoE
from . import stored_experts, unlike
from .names import FLOATS, Matrix, Names, tied
from .quantized import mxfp4
from .quantized.compressed_tensors import HINT
from .tensors.safetensors import Checkpoint

EXACT = ("e_score_correction_bias", "expert_bias", "A_log", "dt_bias")
"""Vectors that stay in float32: a router's bias, by its names, which decides between scores that
differ by less than bfloat16 keeps of it, and what a gated delta net's decay over all tokens is of.
"""


@dataclass(frozen=True, slots=True)
class PlannedDense:
    """One parameter or buffer: its dotted name, its source, the dtype that it gets."""

    name: str
    source: Matrix
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class PlannedExperts:
    """The routed experts of one block.

    `name`: the module that gets them, a `FusedMoE` or one of Hugging Face; `stored`: the format
    of gate and up in `pykernels.quant`, bf16 where a GGUF file has them in two; `experts`: (gate
    [I, H], up [I, H], down [H, I]) of each; `down_stored`: the format of down; `biases`: of each,
    if they have some.
    """

    name: str
    stored: str
    experts: list[tuple[Matrix, Matrix, Matrix]]
    down_stored: str
    biases: list[tuple[Matrix, Matrix, Matrix]] = field(default_factory=list)

    def packed(self, module: FusedMoE) -> tuple[str, str]:
        """The formats that `module` keeps them in: gate's and up's, and down's."""
        return module.packed_format(self.stored), module.packed_format(self.down_stored)


@dataclass(slots=True)
class Plan:
    """Everything to load, in the order of the model's modules.

    `lossy`: F16 or F32 if experts stored so are rounded to bfloat16. `notes`: what is left out.
    """

    items: list[PlannedDense | PlannedExperts] = field(default_factory=list)
    lossy: str | None = None
    notes: list[str] = field(default_factory=list)


def make_plan(
    model: PreTrainedModel, checkpoint: Checkpoint, dtype: torch.dtype, whole: bool = False
) -> Plan:
    """The load plan of an injected meta model; `dtype` is of all but the experts.

    Args:
        whole: MLA's ``kv_b_proj`` is wanted as one matrix, where a GGUF file has it in both ways.

    Raises `PykernelsError` for missing or unexpected tensors and for wrong shapes or dtypes.
    """
    names, plan = Names(model, checkpoint), Plan()
    strict = [*(model._keep_in_fp32_modules_strict or ()), *EXACT]
    skip, instead = tied(model, names)
    done: set[int] = set()  # parameters that two modules share are loaded once
    for path, module in model.named_modules():
        if isinstance(module, FusedMoE):
            _add_experts(plan, names, module, path)
        elif is_fused_experts(module):
            _add_experts(plan, names, module, path)
            continue
        for leaf, tensor in _own_tensors(module):
            name = f"{path}.{leaf}" if path else leaf
            if id(tensor) in done or name in skip:
                continue
            done.add(id(tensor))
            if parts := _in_parts(names, name, tensor, dtype, whole):
                plan.items += parts
                continue
            source = names.take(instead.get(name, name), tuple(tensor.shape))
            if source is not None:
                exact = any(f".{part}." in f".{name}." for part in strict)
                target = torch.float32 if exact else dtype
                plan.items.append(_dense(name, source, tensor, target, checkpoint))
    plan.notes = [*names.finish(), *_unlike_notes(plan)]
    return plan


def _unlike_notes(plan: Plan) -> list[str]:
    experts = [item.experts[0] for item in plan.items if isinstance(item, PlannedExperts)]
    dense = [item for item in plan.items if isinstance(item, PlannedDense)]
    return unlike.notes(
        {item.name: item.source.fmt or "bf16" for item in dense},
        ((gate.fmt or "bf16", up.fmt or "bf16") for gate, up, _ in experts),
    )


def is_fused_experts(module: nn.Module) -> bool:
    """Whether `module` is a Hugging Face experts module that can be filled expert by expert."""
    own = dict(module.named_parameters(recurse=False))
    if set(own) != {"gate_up_proj", "down_proj"} or any(p.ndim != 3 for p in own.values()):
        return False
    E, H, I = own["down_proj"].shape  # noqa: E741
    return own["gate_up_proj"].shape == (E, 2 * I, H)


def fused_shape(experts: Any) -> MoEShape:
    """Sizes of such a module; topk is 1, since the module does not know it."""
    E, H, I = experts.down_proj.shape  # noqa: E741
    return MoEShape(E=E, H=H, I=I, topk=1)


def _own_tensors(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    for leaf, buffer in module.named_buffers(recurse=False):
        if leaf not in module._non_persistent_buffers_set:
            yield leaf, buffer


def _in_parts(
    names: Names, name: str, tensor: torch.Tensor, dtype: torch.dtype, whole: bool
) -> list[PlannedDense | PlannedExperts]:
    """What GGUF stores instead of one of the model's matrices; nothing where it has this one."""
    return _latent_halves(names, name, tensor, dtype, whole) or _delta_parts(
        names, name, tensor, dtype
    )


def _delta_parts(
    names: Names, name: str, tensor: torch.Tensor, dtype: torch.dtype
) -> list[PlannedDense | PlannedExperts]:
    """What it stores for Qwen3-Next's ``in_proj_qkvz``: ``in_proj_qkv``, all heads of each below
    the other, and ``in_proj_z``."""
    keys = [name.replace("in_proj_qkvz", part) for part in ("in_proj_qkv", "in_proj_z")]
    if keys[0] == name or name in names.stored or keys[0] not in names.stored:
        return []
    N, K = tensor.shape
    cfg = names.config
    z = cfg.linear_num_value_heads * cfg.linear_value_head_dim
    found = [names.take(key, (rows, K)) for key, rows in zip(keys, (N - z, z), strict=True)]
    return [
        PlannedDense(key, m, dtype) for key, m in zip(keys, found, strict=True) if m is not None
    ]


def _latent_halves(
    names: Names, name: str, tensor: torch.Tensor, dtype: torch.dtype, whole: bool
) -> list[PlannedDense | PlannedExperts]:
    """What GGUF stores for MLA's ``kv_b_proj`` [NH (nope + dv), L]: ``k_b_proj`` [NH, L, nope],
    already transposed, and ``v_b_proj`` [NH, dv, L]. Some files have it whole, some in both ways;
    the first ones with halves had their heads one below the other.
    """
    keys = [name.replace("kv_b_proj", half) for half in ("k_b_proj", "v_b_proj")]
    if keys[0] == name or not all(key in names.stored for key in keys):
        return []
    if whole and name in names.stored:
        names.unused.difference_update(keys)
        return []
    names.unused.discard(name)
    N, L = tensor.shape
    NH, nope = names.config.num_attention_heads, names.config.qk_nope_head_dim
    shapes = (NH, L, nope), (NH, N // NH - nope, L)
    halves = [names.take(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    return [
        PlannedDense(key, m, dtype) for key, m in zip(keys, halves, strict=True) if m is not None
    ]


def _dense(
    name: str, source: Matrix, tensor: torch.Tensor, dtype: torch.dtype, checkpoint: Checkpoint
) -> PlannedDense:
    stored = checkpoint.tensors[source.data.name].dtype
    if not tensor.is_floating_point():
        dtype = tensor.dtype
    elif stored not in FLOATS and source.fmt is None:
        raise PykernelsError(
            f"{source.data.name} is {stored}, the model needs {', '.join(FLOATS)} there",
            "Store it as float32" if stored == "F64" else HINT,
        )
    return PlannedDense(name, source, dtype)


def _add_experts(plan: Plan, names: Names, module: Any, path: str) -> None:
    """Plan the experts of `module` at `path`, a `FusedMoE` or a module of transformers."""
    packed = isinstance(module, FusedMoE)
    block = module.stored_name if packed else path
    shape = module.shape if packed else fused_shape(module)
    if f"{block}.gate_proj" in names.stored:
        experts = stored_experts.stacked(names, block, shape)
    elif f"{block}.gate_up_proj_blocks" in names.stored:
        experts = mxfp4.find(names, block, shape.E, shape.H, shape.I)
    elif f"{block}.gate_up_proj" in names.stored:
        in_turns = packed and module.in_turns and not names.checkpoint.blocks
        fused = stored_experts.in_turns if in_turns else stored_experts.fused
        experts = fused(names, block, shape)
    else:
        experts = stored_experts.separate(names, block, shape)
    if not experts:
        return  # missing, which `Names.finish` reports
    plain = [m for expert in experts for m in expert if m.fmt is None]
    for dtype, matrix in {names.checkpoint.tensors[m.data.name].dtype: m for m in plain}.items():
        if dtype not in FLOATS:
            raise PykernelsError(
                f"{matrix.data.name} is {dtype}, experts can be BF16, F16, F32, F8_E4M3 or I8",
                "Store them as float32" if dtype == "F64" else HINT,
            )
        if packed and dtype in ("F16", "F32") and module.packed_format("bf16") == "bf16":
            plan.lossy = dtype
    if len(_formats(m for expert in experts for m in expert)) > 1:
        experts = [(_whole(gate), _whole(up), _whole(down)) for gate, up, down in experts]
    stored = _formats(m for gate, up, _ in experts for m in (gate, up))
    if names.checkpoint.blocks and len(stored) == 2:  # a type for each projection
        stored = ["bf16"]
    down_stored = _formats(down for *_, down in experts)
    for each in (stored, down_stored):
        if len(each) > 1:
            raise PykernelsError(
                f"The experts of {block} are partly {' and partly '.join(each)}",
                names.checkpoint.mismatch,
            )
    biases = stored_experts.biases(names, block, shape) if packed and shape.spec.bias else []
    plan.items.append(PlannedExperts(path, stored[0], experts, down_stored[0], biases))


def _formats(matrices: Iterable[Matrix]) -> list[str]:
    return sorted({matrix.fmt or "bf16" for matrix in matrices})


def _whole(matrix: Matrix) -> Matrix:
    """int4 whose inputs are one single group has one scale per output: int4-channel."""
    groups = {"int4": 32, "int4-g128": 128}
    one_group = matrix.shape[-1] <= groups.get(matrix.fmt or "", 0)
    return replace(matrix, fmt="int4-channel") if one_group else matrix
