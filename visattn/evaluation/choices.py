"""Choices of metrics."""

from typing import Literal

By = Literal["pixels", "cells"]  # what is removed
Replacement = Literal["black", "mean", "image mean", "blur"]  # what takes its place
MetricName = Literal["deletion", "insertion", "positive", "negative", "saco", "sensitivity_n", "road", "infidelity"]
LocatedName = Literal["auroc", "average_precision", "pointing_game", "energy_inside", "lift"]  # which need a mask
