"""Levels of the KV cache behind the pages of a device: blocks of it outlive pages and processes."""
