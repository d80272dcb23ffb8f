"""Which format a model writes: what its template shows, else what its family is known for."""

from __future__ import annotations

from .gemma import Gemma
from .harmony import Harmony
from .json_call import Hermes, Mistral
from .message import Format
from .parser import FormatParser
from .python_call import PythonCall
from .tagged import DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2
from .xml_call import GLM_45, GLM_47, MINIMAX_M2, QWEN3_CODER

_BY_TEMPLATE: tuple[tuple[tuple[str, ...], Format], ...] = (
    (("<|channel|>", "<|message|>"), Harmony()),
    (("<|tool_call>", '<|"|>'), Gemma()),
    (("<minimax:tool_call>", "<invoke name="), MINIMAX_M2),
    (("</arg_key>\n<arg_value>",), GLM_45),
    (("</arg_key><arg_value>",), GLM_47),
    (("<function=", "<parameter="), QWEN3_CODER),
    (("<|tool_call_argument_begin|>",), KIMI_K2),
    (("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK_V3),
    (("<｜tool▁calls▁begin｜>",), DEEPSEEK_V31),
    (("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), Mistral(with_id=True)),
    (("[TOOL_CALLS]", "[ARGS]"), Mistral()),
    (("[TOOL_CALLS]",), Mistral(array=True)),
    (("<tool_call>",), Hermes()),
    (("<|tool_call_start|>",), PythonCall()),
    (("<|tool_list_start|>",), PythonCall()),
)
"""Texts that a template must all contain; the first row that fits decides."""

_BY_FAMILY: dict[str, Format] = {
    "deepseek_v3": DEEPSEEK_V3,
    "gemma4_text": Gemma(),
    "glm4_moe": GLM_45,
    "glm4_moe_lite": GLM_47,
    "gpt_oss": Harmony(),
    "kimi_k2": KIMI_K2,
    "lfm2": PythonCall(),
    "lfm2_moe": PythonCall(),
    "minimax_m2": MINIMAX_M2,
    "mistral": Mistral(array=True),
    "mixtral": Mistral(array=True),
    "qwen2_moe": Hermes(),
    "qwen3_5_moe_text": QWEN3_CODER,
    "qwen3_moe": Hermes(),
    "qwen3_next": Hermes(),  # Qwen3-Coder-Next's template shows the other format
}


def parser_for(model_type: str, chat_template: str = "") -> FormatParser:
    """The parser of a model.

    Args:
        model_type: of its config.
        chat_template: the text of its template, which decides: a family may have several formats.
            A template that shows no calls leaves the family's own.

    Returns:
        Of a family that is not known, a parser that takes off reasoning in <think> and finds calls
        as Hermes writes them.
    """
    reasons = any(end in chat_template for end in ("</think>", "[/THINK]", "<channel|>"))
    for shown, form in _BY_TEMPLATE:
        if all(text in chat_template for text in shown):
            return FormatParser(form, reasons=reasons)
    return FormatParser(_BY_FAMILY.get(model_type, Hermes()), reasons=reasons)
