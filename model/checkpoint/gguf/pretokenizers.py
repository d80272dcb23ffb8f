"""How texts are split before byte-pair merges, by ``tokenizer.ggml.pre``.

Each is a list of regular expressions, applied in turn; what they match stands alone. Sources: the
``tokenizer.json`` of the models that llama.cpp gives these names to (its
``convert_hf_to_gguf_update.py`` lists them).
"""

from __future__ import annotations

_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_ENDINGS}|{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}"
_MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_MARKED_SIGNS = r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
_QWEN35 = rf"{_ENDINGS}|{_MARKED_WORD}|\p{{N}}|{_MARKED_SIGNS}|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_HAN = "[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_KIMI = (
    r"[\p{Han}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?(?:(?!\p{{Han}}){_UPPER})*(?:(?!\p{{Han}}){_LOWER})+{_ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?(?:(?!\p{{Han}}){_UPPER})+(?:(?!\p{{Han}}){_LOWER})*{_ENDINGS}?"
    rf"|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
)
_DEEPSEEK2 = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-퟿]+",
    r"\p{N}",
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
"""llama.cpp's own, where a file does not say."""

SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "olmo", "jais"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "lfm2", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
        (_LLAMA3,),
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "dots1", "megrez"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), (_GPT4O,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), (r"\p{N}{1,3}", _HAN, _DEEPSEEK3)),
    "deepseek-llm": _DEEPSEEK2,
    "default": _DEFAULT,
    "kimi-k2": (_KIMI,),
}
"""Pre-tokenizers by llama.cpp's names."""

WHOLE_WORDS_FIRST = frozenset(("llama3", "llama-v3", "llama-bpe", "lfm2"))
"""The pre-tokenizers whose words that are tokens stay whole, whatever the merges say."""

BOS_FIRST = frozenset(("llama3", "llama-v3", "llama-bpe", "lfm2"))
"""The pre-tokenizers that begin with bos where the file does not say."""
