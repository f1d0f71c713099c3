"""Choices of metrics."""

from typing import Literal

By = Literal["pixels", "cells"]  # what is removed
Replacement = Literal["black", "mean", "image mean", "blur"]  # what takes its place
