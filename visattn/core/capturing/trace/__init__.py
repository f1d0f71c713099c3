"""Tape of a forward pass: each operation is recorded, or compared with a tape that is already known."""
