"""Parts of `make_gallery.py`."""
