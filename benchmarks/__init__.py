"""Benchmarks of natgrad; run one as `python -m benchmarks.NAME`, results go to `benchmarks/results/NAME.json`."""
