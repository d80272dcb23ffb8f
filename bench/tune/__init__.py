"""Launch plans timed on this GPU; the best are kept: python -m bench.tune."""
