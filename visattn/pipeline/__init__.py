"""From a photo and a model to an explanation: inputs, a run of the model, a method, a map on the photo."""
