"""What the library is judged by: slow loops from the papers, in float64, that share no code with it.

`maps`: attention, rollout, sinks, masks. `methods`: every other method. `heatmaps`: from the grid to pixels.
`arithmetic`: on lists of numbers, for modules of `nn`.
"""
