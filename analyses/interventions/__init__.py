"""Changing values and head outputs while a model runs, and what that does to the loss."""
