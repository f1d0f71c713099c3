"""Parts of `localization.py`."""
