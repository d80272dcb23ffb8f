"""Whole models: the engine, beside llama.cpp and transformers."""
