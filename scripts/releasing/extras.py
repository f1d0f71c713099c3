"""A command for each extra: it works with the extra alone, and without it says in one sentence how to install it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from releasing.environments import Environment
from releasing.record import Outcome

_STUDY = "import visattn; visattn.study('scenes_vit', 'scene:7').widget()"
_STATS = (  # writes tables without the extra, and says so in passing; the end says it again
    "from visattn._support.extras import need; from visattn.cli import main; from visattn.data import photo_path\n"
    "try: main(['stats', str(photo_path('coffee').parent), '--model', 'scenes_vit', '-o', 'stats'])\n"
    "finally: need('matplotlib', 'figures', 'a plot')"
)
_HF = "import visattn; visattn.load_model('hf:nothing/here')"
_SCORES = "from visattn.captioning.metrics import caption_scores; print(caption_scores(['a red star'], ['a red star']))"
_TRAIN = (
    "train classify --data scenes --epochs 0.01 --train-count 32 --test-count 8 --batch-size 8 --workers 0 --tensorboard -o run"
)
_SEGMENTED = "import visattn.data; visattn.data.load_segmented('none.mat')"
_YOLO = (
    "from ultralytics import YOLO; import visattn; "
    "visattn.explain(YOLO('yolo11n-cls.yaml').model, 'photo:coffee', method='gradcam').save('yolo.png')"
)
NETWORKS = "networks"  # the others are tried with it
COMMANDS = {
    NETWORKS: "overlay scene:7 --model scenes_vit",
    "flow": "overlay scene:7 --model scenes_vit --method attention_flow",
    "figures": _STATS,
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
    "segmentation": _SEGMENTED,
    "ray": "batch scene:7 --model scenes_vit --engine ray -o maps",
    "ultralytics": _YOLO,
}
WORKS = {
    "hf": "hf:nothing/here: ",
    "segmentation": "none.mat: ",
}  # what a command says that reached the library; the sentence of the extra does not have it
IMPORTED = {"ultralytics": "No module named 'ultralytics'"}  # its users import it themselves, so visattn has nothing to say


class Trial(NamedTuple):
    """What was seen of an extra.

    Attributes:
        installed: What pip did.
        without: What the command did before.
        after: What it did after.
    """

    installed: Outcome
    without: Outcome
    after: Outcome


def tried(extra: str, base: Environment, python: str, wheels: Path) -> list[Outcome]:
    """Try the command of an extra without and with it; return what each did, with status 0 if that was right."""
    without = _run(base, extra)
    with Environment(base.folder.with_name(f"extra-{extra}"), python, base) as own:
        installed = own.install("--find-links", str(wheels), f"visattn[{extra}]")
        after = _run(own, extra)
    return judged(extra, Trial(installed, without, after))


def judged(extra: str, trial: Trial) -> list[Outcome]:
    """Return the outcomes with status 0 if they are right: the sentence without the extra, and success with it."""
    sentence = IMPORTED.get(extra, f'pip install "visattn[{extra}]"')
    says = trial.without.status != 0 and sentence in trial.without.last
    works = trial.after.status == 0 or WORKS.get(extra, "\0") in trial.after.last
    return [
        trial.installed,
        trial.without._replace(name="without", status=int(not says)),
        trial.after._replace(name="with", status=int(not works)),
    ]


def _run(environment: Environment, extra: str) -> Outcome:
    command = COMMANDS[extra]
    if command.startswith(("import", "from")):
        return environment.run(extra, "python", "-c", command)
    return environment.run(extra, "python", "-m", "visattn", *command.split())  # an extra's environment has no script of its own
