"""Viewer: a study, or a space of queries and keys, as one HTML page that opens anywhere, without a network and without visattn.

`html_of` makes the page of a study, `visattn.embedding.save_html` that of a space.
Their sources are in `viewer/src`; the scripts in `built/` are what esbuild makes of them.
"""

from visattn.viewer.page import html_of

__all__ = ["html_of"]
