"""Records of a forward pass: attention as operators, features as tensors, and the layout of their tokens.

`capture` fills a `Recording`, which is all that methods read. It holds neither the model nor a picture.
"""

from visattn.core.records.entries import AttentionRecord, FeatureRecord, Source, UnseenAttention, split_call
from visattn.core.records.layouts import TokenLayout
from visattn.core.records.readouts import PROBES, Readout, probes_of, shares_of
from visattn.core.records.recording import NoGradient, Recording

__all__ = [
    "PROBES",
    "AttentionRecord",
    "FeatureRecord",
    "NoGradient",
    "Readout",
    "Recording",
    "Source",
    "TokenLayout",
    "UnseenAttention",
    "probes_of",
    "shares_of",
    "split_call",
]
