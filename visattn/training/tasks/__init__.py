"""Training tasks: classification and captioning."""
