"""Parts of `known_truth.py`."""
