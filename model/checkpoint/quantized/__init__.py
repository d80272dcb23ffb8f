"""Quantized matrices as other tools store them: which are read, and how they become `Weight`s."""
