"""Places of the elements of every tensor of a forward pass: recorded as PyTorch's own operations, then followed by one rule for each."""
