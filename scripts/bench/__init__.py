"""Parts of `benchmark.py`. Each runs in its own process (`python -m bench.timing`), with `scripts` on the Python path."""
