"""Reports of a run: model card, curves, comparison tables."""
