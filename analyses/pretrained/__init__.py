"""Geometry and in-context evidence of pretrained models, on shipped prompts."""
