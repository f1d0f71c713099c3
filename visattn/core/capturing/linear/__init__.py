"""Forward passes whose autograd graph is linear, so that an output is a sum of terms."""
