"""Pages of the viewer and of the embedding for the gallery of the site: `live.py` writes those that are missing or older than the code."""

from __future__ import annotations

from places import ROOT

FOLDER = ROOT / "build" / "live"
OBJECTS = ROOT / "assets" / "objects"
TITLES = {
    "cat": "Every head of DINOv2 for the patch under the pointer",
    "shapes": "Two networks of the same task: one learned shapes, one learned a watermark",
    "space": "All heads of DINOv2 in one query-key space, over twelve photos",
}


def main() -> None:
    """Write the pages."""
    newest = max(path.stat().st_mtime for path in (ROOT / "visattn").rglob("*.py"))
    files = [FOLDER / f"{name}.html" for name in TITLES]
    if all(file.exists() and file.stat().st_mtime > newest for file in files):
        return
    import visattn
    from visattn.data import offline_weights
    from visattn.embedding import gather, save_html

    FOLDER.mkdir(parents=True, exist_ok=True)
    offline_weights()
    cat, shapes, space = files
    dino = visattn.load_model("vit_small_patch14_dinov2.lvd142m")
    visattn.study(dino, "photo:chelsea", img_size=224).save_html(cat)
    two = visattn.study("scenes_vit", "scene:7", name="learned shapes")
    (two + visattn.study("scenes_vit_shortcut", "scene:7", name="learned a watermark")).save_html(shapes)
    photos = sorted(path for path in OBJECTS.iterdir() if path.suffix in (".jpg", ".png"))
    save_html(gather(dino, photos, img_size=112), space)


if __name__ == "__main__":
    main()
