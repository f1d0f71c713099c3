"""Methods that read the gradient of a score at features or at the pixels."""
