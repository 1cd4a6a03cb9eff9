"""Federated algorithms, one file for each method, named as in ``algorithm.kind``."""
