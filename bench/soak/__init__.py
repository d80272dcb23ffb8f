"""Thousands of steps with random delays and failures, every token checked."""
