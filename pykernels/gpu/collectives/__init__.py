"""Sums over GPUs that reach each other's memory."""
