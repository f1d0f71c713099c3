"""Viewer: one HTML page that opens anywhere, without a network and without visattn.

It knows neither studies nor spaces: these give it plain values and arrays, and `visattn.studies` and `visattn.embedding` say what is in
a page. Its sources are in `viewer/src`; the scripts in `built/` are what esbuild makes of them.
"""

from visattn.viewer.encoding import Encoded, encoded
from visattn.viewer.packing import Packed
from visattn.viewer.page import MAX_MB, check_size, framed, written
from visattn.viewer.widget import widget_of

__all__ = ["MAX_MB", "Encoded", "Packed", "check_size", "encoded", "framed", "widget_of", "written"]
