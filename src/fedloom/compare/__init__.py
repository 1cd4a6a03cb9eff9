"""Comparisons: many runs, and tables of them."""

from fedloom.compare.run import run
from fedloom.compare.write import Comparison

__all__ = ["Comparison", "run"]
