"""Write down a forward pass: every operation on a tape, or its comparison with a known one."""
