"""Parts of `scripts/release.py`."""
