"""Parts of `benchmark.py`, each run in a process of its own: `python -m bench.timing`, with this folder's parent on the path."""
