"""Numbers that the parts of the benchmark and their processes share."""

THREADS = 2
TRAINING_BATCH = 32  # images
