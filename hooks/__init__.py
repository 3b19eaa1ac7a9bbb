"""How an attention call is seen: one adapter per way a model computes it."""
