"""Scenes of the networks of known causes as files, for methods that draw their maps elsewhere."""

from __future__ import annotations

import io
from pathlib import Path

from visattn._support.checks import printable
from visattn._support.files import exists
from visattn._support.tables import Row, to_csv
from visattn._support.whole_files import write_whole
from visattn.errors import OutputError
from visattn.evaluation.causes.bench import WITHOUT
from visattn.evaluation.causes.networks import PATCH, CauseNetwork, another, cause_networks

LIST = "maps.csv"


def export_scenes(folder: Path, networks: list[CauseNetwork], scenes: int, seed: int) -> Path:
    """Write the scenes, and the list of the maps that `find_causes` reads.

    Each row of the list is a map to draw: the folder of the network (`visattn.load_model` loads it), the image, the class to explain, and
    the file that the map goes to, any of .npy, .csv, .txt, .tif and .png. Paths of images and maps are relative to the folder.

    Args:
        folder: A new folder.
        networks: The networks.
        scenes: Number of scenes of each.
        seed: Seed of the scenes.

    Returns:
        The list.

    Raises:
        OutputError: If the folder is there already, or cannot be written.
    """
    if exists(folder):
        raise OutputError(f"{printable(str(folder))}: is there already; pass a new folder")
    every, rows = cause_networks(), list[Row]()
    for network in networks:
        other = network if network.cause == PATCH else another(network, every)
        part = network.name if network.cause == PATCH else network.cause
        for case in network.cases(scenes, seed):
            images = {f"scenes/{part}/{case.number}.png": case.image}
            if case.without is not None:
                images[f"scenes/{part}/{WITHOUT}/{case.number}.png"] = case.without
            for name, image in images.items():
                if not exists(folder / name):
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    content = io.BytesIO()
                    image.save(content, "PNG")
                    write_whole(folder / name, content.getvalue())
            names = list(images)
            of = {"image": names[0], "class": case.label, "map": f"{network.name}/{case.number}.npy"}
            rows.append({"network": str(network.folder), **of})
            of = {"image": names[-1], "class": case.label, "map": f"{network.name}/{WITHOUT}/{case.number}.npy"}
            rows.append({"network": str(other.folder), **of})
    return write_whole(folder / LIST, to_csv(rows).encode())
