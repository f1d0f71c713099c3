"""Choices and limits shared by several modules."""

from __future__ import annotations

from typing import Literal

LARGEST_BATCH = 2**16  # images that run through a model together
MAX_PIXELS = 64_000_000  # default limit for the pixels of an image
MAX_BYTES = 2**30  # default limit for the bytes of its file

Fusion = Literal["mean", "max", "min"]
Sinks = Literal["keep", "drop", "redistribute"]
Interpolation = Literal["nearest", "bilinear", "bicubic"]
Normalization = Literal["auto", "minmax", "none", "percentile", "symmetric"]
Colormap = Literal["inferno", "magma", "plasma", "viridis", "cividis", "turbo", "jet", "bone", "gray", "blue-white-red"]
Blend = Literal["auto", "value", "constant"]
Ground = Literal["auto", "photo", "gray"]
MapFormat = Literal["npz", "npy", "csv", "tif", "png"]  # endings of saved maps
Resize = Literal["auto", "fit", "model"]
Kind = Literal["self", "cross", "pool", "sampled", "channel", "unplaced"]
Gate = Literal["channel_gate", "spatial_gate", "gate", "branch_gate"]
Role = Literal["activation", "tokens", Gate, "transform", "glimpse", "window", "positions", "mix"]
ColorProfile = Literal["convert", "ignore"]
DiscardOver = Literal["row", "layer"]
Sampling = Literal["sample", "argmax", "expected", "gumbel"]
By = Literal["attention", "gradient"]  # what the map of a word shows
Implementation = Literal["tiles", "reversed"]
Space = Literal["logit", "prob", "logprob"]
Task = Literal["classes", "multi_label", "regression", "embedding"]  # what a model's outputs are
Variant = Literal["paper", "official"]
Split = Literal["train", "test"]
Property = Literal["hue", "brightness", "object", "row", "column", "neighbor"]  # of patches, by which heads are ranked
Criterion = Literal["norms", "weighted", "shared"]
Layout = Literal["pca", "tsne", "umap"]
View = Literal["overlay", "beside", "heads"]
MeanBy = Literal["all", "class", "folder"]
Engine = Literal["local", "ray"]
