"""What an explanation is about: one forward pass, one file, one model. Everything else in the package stands on its public names."""
