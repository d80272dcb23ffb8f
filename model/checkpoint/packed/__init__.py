"""A packed cache: a checkpoint in the layout that kernels read, which is mapped instead of loaded.

A folder of one file for each layer, one for what is before and behind them (`ends`), a manifest and
what else a checkpoint has (config, tokenizer). The files are safetensors, every tensor at a
multiple of 4 KiB. Mapped read-only and shared, they are the page cache itself: processes that serve
one model share its memory, and a second load copies nothing.
"""
