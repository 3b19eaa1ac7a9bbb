"""Figures in one style."""
