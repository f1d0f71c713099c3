"""Follow tokens along a tape, from the pixels to each attention and to the output."""
