"""Tracing of tokens along a tape, from the pixels to each attention call and to the output."""
