"""Attention for decoders and recurrent models, which attend anew at each step."""
