"""Benchmarks and figures of the source, which are not installed: `python -m bench prefix`, `python -m bench.house`."""
