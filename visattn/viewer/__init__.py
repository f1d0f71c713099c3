"""Viewer: a study as one HTML page that opens anywhere, without a network and without visattn.

`html_of` makes the page. Its sources are in `viewer/src`; `built/viewer.js` is what esbuild makes of them.
"""

from visattn.viewer.page import html_of

__all__ = ["html_of"]
