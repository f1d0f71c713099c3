"""The heavier proofs: `proofs.py [--only NAME,NAME] [--list] [--again]`.

A proof whose result is kept in `assets/evidence` is not run again, unless it failed, or a file that it read has changed since. So a run
that was interrupted goes on where it stopped. At the end, a table says which proofs hold for the present tree. Speed is not measured here,
but by `scripts/benchmark.py`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from evidence.results import file_of
from evidence.running import Evidence, Proof

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "assets" / "evidence"

HOSTILE = "archives", "journals", "lists", "configurations", "films", "maps", "models", "folders", "commands"
PROOFS = {  # the longest of those that run beside others come first
    **{f"hostile {kind}": Proof(f"-m tests.hostile --only {kind}") for kind in HOSTILE},
    **{f"hostile {kind} without nets": Proof(f"-m tests.hostile --only {kind} --no-net --seed 1") for kind in HOSTILE},
    "kills while saving": Proof("-m tests.training.kills saves 200"),
    "kills of trainings": Proof("-m tests.training.kills runs 20"),
    "kills of runs over images": Proof("-m tests.batch.kills 300"),
    "many images": Proof("scripts/many_images.py"),
    "captions of scenes": Proof("scripts/captions.py"),
    "gradients of hard attention": Proof("scripts/estimator.py"),
    "mutants of capturing": Proof("scripts/mutation.py capturing --seed 15604", whole=True),
    "mutants of maps": Proof("scripts/mutation.py maps --seed 40796", whole=True),
    "all cases": Proof("-m pytest -q -m evidence tests"),
    "wheel": Proof("scripts/wheel.py", whole=True),
    "installs": Proof("-m tests.pages.installs", whole=True),
    "coverage": Proof("scripts/model_coverage.py"),
    "known truth": Proof("scripts/known_truth.py"),
    "many photos": Proof("scripts/many_photos.py"),
    "localization": Proof("scripts/localization.py"),
    "layers of Grad-CAM": Proof("scripts/cam_layers.py"),
    "attach": Proof("scripts/attach_sweep.py"),
    "contexts of calls": Proof("-m tests.contexts --pairs 4"),
    "oldest transformers": Proof("scripts/oldest_transformers.py"),
    "a run on a cluster": Proof("-m tests.batch.cluster 500", alone=True),
    "contributions": Proof("scripts/contribution_coverage.py"),
    "contributions and causes": Proof("scripts/contributions_of_causes.py"),
    "metrics beside Quantus": Proof("scripts/beside_quantus.py"),
    "tasks of other libraries": Proof("scripts/task_coverage.py"),
    "Ultralytics": Proof("scripts/ultralytics_coverage.py"),
    "other libraries": Proof("scripts/library_coverage.py", alone=True),
}


def main() -> int:
    """Run what is missing, and print the table; return 1 if a proof failed or is missing."""
    parser = argparse.ArgumentParser(description="Run the heavier proofs.")
    parser.add_argument("--only", type=_names, default=list(PROOFS), metavar="NAME,NAME", help=f"of {', '.join(PROOFS)}")
    parser.add_argument("--list", action="store_true", help="run nothing, and print which results are kept")
    parser.add_argument("--again", action="store_true", help="forget the kept results of these proofs first")
    options = parser.parse_args()
    evidence = Evidence(PROOFS, ROOT, RESULTS)
    if options.again:
        for name in options.only:
            file_of(RESULTS, name).unlink(missing_ok=True)
    if not options.list:
        try:
            evidence.run(options.only)
        except KeyboardInterrupt:
            print("\nevidence: interrupted; run it again to go on", file=sys.stderr)
    lines, missing = evidence.table(options.only)
    print("\n".join(lines))
    if missing:
        print(f"evidence: missing for this tree: {', '.join(missing)}", file=sys.stderr)
    return int(bool(missing))


def _names(text: str) -> list[str]:
    chosen = text.split(",")
    for name in chosen:
        if name not in PROOFS:
            raise argparse.ArgumentTypeError(f"no proof is called '{name}'. Choose from {', '.join(PROOFS)}.")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
