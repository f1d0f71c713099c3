"""Steps from a photo and a model to an explanation: preprocessing, forward pass, method, map on the photo."""
