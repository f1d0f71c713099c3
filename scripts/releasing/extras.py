"""A command for each extra: it works with the extra alone, and without it says in one sentence how to install it."""

from __future__ import annotations

from pathlib import Path

from releasing.environments import Environment, Outcome

_STUDY = "import visattn; visattn.study('scenes_vit', 'scene:7').widget()"
_HF = "import visattn; visattn.load_model('hf:nothing/here')"
_SCORES = "from visattn.captioning.metrics import cider; print(cider([['a', 'cat']], [[['a', 'cat']]]))"
_TRAIN = "train classify --data scenes --epochs 0.01 --train-count 32 --test-count 8 --workers 0 --tensorboard -o run"
COMMANDS = {
    "flow": "overlay scene:7 --model scenes_vit --method attention_flow",
    "figures": "stats scene:7 --model scenes_vit -o stats",
    "attribution": "overlay scene:7 --model scenes_cnn --method captum.saliency",
    "cam": "overlay scene:7 --model scenes_cnn --method eigencam",
    "tensorboard": _TRAIN,
    "caption-metrics": _SCORES,
    "hf": _HF,
    "clip": "inspect clip:ViT-B-32 --weights none",
    "notebook": _STUDY,
    "embed": "embed scene:7 scene:8 --model scenes_vit --layout tsne -o space.html",
    "umap": "embed scene:7 scene:8 --model scenes_vit --layout umap -o space.html",
    "video": "video photo:coffee --walk 2 --model scenes_vit --method attention -o walk.mp4",
    "ray": "batch scene:7 --model scenes_vit --engine ray -o maps",
}
WORKS = {"hf": "not found"}  # the end of what a command says that reaches the library and has no network


def matrix(base: Environment, wheels: Path, folder: Path) -> bool:
    """Try each extra without and with it; print a row for each, and return whether one failed."""
    wrong = []
    for extra, command in COMMANDS.items():
        without = _tried(base, extra, command, folder / f"{extra}-without")
        own = Environment(folder / extra, base=base)
        installed = own.install("--find-links", str(wheels), f"visattn[{extra}]")
        after = _tried(own, extra, command, folder / f"{extra}-with")
        own.remove()
        says = without.status == 2 and f'pip install "visattn[{extra}]"' in without.last
        works = installed.status == 0 and (after.status == 0 or after.last.endswith(WORKS.get(extra, "\0")))
        print(f"{extra:16} without: {'its sentence' if says else without.last!r}; with: {'works' if works else after.last!r}")
        if not (says and works):
            wrong.append(extra)
    print(f"{len(COMMANDS)} extras, {len(wrong)} wrong: {', '.join(wrong) or 'none'}")
    return bool(wrong)


def _tried(environment: Environment, extra: str, command: str, folder: Path) -> Outcome:
    folder.mkdir()
    if command.startswith(("import", "from")):
        return environment.run(extra, "python", "-c", command, folder=folder)
    return environment.run(extra, "visattn", *command.split(), folder=folder)
