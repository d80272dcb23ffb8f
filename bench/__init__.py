"""Benchmarks: pytest-benchmark suites, off in the tests, run by `make bench`."""
