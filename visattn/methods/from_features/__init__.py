"""Methods that read features of one layer."""
