"""Files of a run, and the coordination of its processes."""
