"""Weights that lie in main memory and cross to GPUs in every step: experts, and dense ones."""
