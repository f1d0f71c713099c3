"""Position codes: integers that identify grid cells. Shadow tensors of codes yield the token layout of each attention call."""
