"""The page as a widget of a notebook, linked with Python: `link` is what the page shows, and changes in both directions."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from visattn._support.extras import need

_SCRIPT = """
export default {
  render({ model, el }) {
    const frame = document.createElement("iframe");
    frame.setAttribute("sandbox", "allow-scripts allow-downloads");
    frame.title = "visattn viewer";
    frame.style.cssText = `width: 100%; height: ${model.get("height")}px; border: 0`;
    frame.srcdoc = model.get("page");
    const told = (event) => {
      if (event.source !== frame.contentWindow || typeof event.data?.visattn !== "string") return;
      model.set("link", event.data.visattn);
      model.save_changes();
    };
    const tell = () => frame.contentWindow?.postMessage({ visattn: model.get("link") }, "*");
    window.addEventListener("message", told);
    model.on("change:link", tell);
    el.append(frame);
    return () => {
      window.removeEventListener("message", told);
      model.off("change:link", tell);
    };
  },
};
"""


def widget_of(page: str, height: int) -> Any:  # noqa: ANN401 - an anywidget.AnyWidget
    """Return a page as a widget.

    Args:
        page: The page, from `html_of`.
        height: Height in pixels.

    Returns:
        A widget with the attribute `link`: what the page shows, as in the address of a saved page.

    Raises:
        MissingExtra: If anywidget is not installed.
    """
    need("anywidget", "notebook", "widget()")
    anywidget, traitlets = import_module("anywidget"), import_module("traitlets")

    class Viewer(anywidget.AnyWidget):  # type: ignore[misc, name-defined]
        """Viewer of a study."""

        _esm = _SCRIPT
        page = traitlets.Unicode().tag(sync=True)
        link = traitlets.Unicode().tag(sync=True)
        height = traitlets.Int().tag(sync=True)

    return Viewer(page=page, height=height)
