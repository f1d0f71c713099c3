"""Methods that read attention weights, and for some of them the gradient of a score."""
