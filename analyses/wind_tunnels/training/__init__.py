"""Transformers trained in tunnels, and their controls."""
