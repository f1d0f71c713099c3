"""Viewer: a study, or a space of queries and keys, as one HTML page that opens anywhere, without a network and without visattn.

`html_of` and `space_html` make the pages. Their sources are in `viewer/src`; the scripts in `built/` are what esbuild makes of them.
"""

from visattn.viewer.page import html_of
from visattn.viewer.space_page import space_html

__all__ = ["html_of", "space_html"]
