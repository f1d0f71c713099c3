"""Plots with axes. No other package imports matplotlib."""
