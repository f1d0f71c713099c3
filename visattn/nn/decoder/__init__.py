"""Attention of decoders and recurrent models: where to look at each step."""
