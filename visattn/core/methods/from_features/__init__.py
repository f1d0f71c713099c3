"""Methods that read the features of one layer."""
