"""The only import of OpenCV. It is used on arrays only, never for files, text or windows, since it crashes on unusual names."""

from __future__ import annotations

try:
    import cv2  # noqa: TID251 - the only import
except ImportError as error:  # opencv-python needs the system's libGL; containers often lack it
    from visattn.errors import MissingExtra

    raise MissingExtra(
        f"OpenCV cannot be imported ({error}). Either install libGL (apt-get install -y libgl1 libglib2.0-0) "
        "or use the headless build (pip uninstall -y opencv-python opencv-python-headless && "
        "pip install opencv-python-headless)."
    ) from error

__all__ = ["cv2"]
