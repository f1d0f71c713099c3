"""Methods that read attention weights. Some also read the gradient of a score."""
