"""Calling contexts: the same explanation inside anybody's program gives the same answer, or a true refusal.

A context is a model, a mode, a method and a photo. `models` builds the models, `modes` are what programs do to a model or around a call,
`asking` asks and writes down what came back, `judge` compares with a fresh process, and `__main__` runs a grid that is drawn by a seed.
"""
