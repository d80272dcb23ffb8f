"""A byte-level BPE tokenizer for Python source: lossless, 4096 tokens.

The pre-tokenizer keeps a newline apart from the indentation after it and from the punctuation
before it. A prompt that ends in `:` or in a newline is then cut just as it was in training, and the
model may go on with either.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 4096
BOS = "<|bos|>"
EOS = "<|eos|>"
BOS_ID = 0
EOS_ID = 1

PATTERN = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?\p{L}+",  # a word with the space, dot, underscore or bracket before it
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+",  # punctuation
        r"[\r\n]+",
        r"[^\S\r\n]+(?!\S)",  # a run of spaces less its last, which the next word takes
        r"[^\S\r\n]+",
    ]
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Learn the merges from `texts`. Ids 0 and 1 are bos and eos; `encode` puts bos in front.

    The result holds all 256 bytes, so `decode(encode(text))` gives any text back exactly.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` as transformers reads them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def load_tokenizer(folder: Path) -> Tokenizer:
    """The `tokenizers` tokenizer of a checkpoint folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode_files(tokenizer: Tokenizer, texts: Iterable[str]) -> list[list[int]]:
    """Each text as `bos, tokens ..., eos`."""
    encoded = tokenizer.encode_batch(list(texts))
    return [encoding.ids + [EOS_ID] for encoding in encoded]
