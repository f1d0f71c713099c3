"""What a run shows to people: cards, curves, comparisons."""
