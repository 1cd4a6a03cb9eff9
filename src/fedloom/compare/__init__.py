"""Comparisons: many runs, and tables of them."""
