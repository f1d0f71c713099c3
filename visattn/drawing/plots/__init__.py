"""Figures with axes, by matplotlib, which is imported nowhere else."""
