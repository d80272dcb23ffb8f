"""Measurements: `make bench-cpu`, `make bench-gpu`, `make bench` (pytest-benchmark suites)."""
