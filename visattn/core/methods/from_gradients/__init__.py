"""Methods that read the gradient of a score with respect to features or pixels."""
