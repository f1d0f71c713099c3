"""Parts of `localisation.py`."""
