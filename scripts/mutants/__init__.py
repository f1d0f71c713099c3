"""Mutation testing: small faults are put into a copy of the project, one at a time, and its tests must notice them."""
