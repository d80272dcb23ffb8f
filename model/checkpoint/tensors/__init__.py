"""Tensors as a checkpoint's files have them: where each lies, and what is read of it."""
