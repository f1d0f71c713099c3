"""Gates that a network multiplies its feature maps by, found on the tape of a forward pass; loaded only where gates are asked for."""
