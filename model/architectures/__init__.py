"""Lowering: a model's modules and weights to programs that devices run."""
