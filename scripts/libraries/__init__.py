"""Models of other libraries at a tiny size, and the sweeps over them."""
