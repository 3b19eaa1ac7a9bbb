"""Values, keys and outputs collected and projected."""
