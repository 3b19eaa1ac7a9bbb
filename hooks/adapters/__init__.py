"""How a model computes attention: one adapter for each way."""
