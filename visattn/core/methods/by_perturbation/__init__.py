"""Methods that run the model on edited inputs."""
