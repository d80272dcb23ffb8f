"""pytest-benchmark suites: make bench."""
