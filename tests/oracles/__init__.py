"""Oracles: slow float64 loops written from the papers, which share no code with the library.

`maps`: attention, rollout, sinks and masks. `methods`: all other methods. `heatmaps`: interpolation from the grid to pixels.
`arithmetic`: arithmetic on lists of numbers, for modules of `nn`.
"""
