"""Exact streaming PCA of a model's vectors, and their read-out beside its nulls."""
