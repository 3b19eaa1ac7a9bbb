"""The law of one attention call: its definition, and the passes that are held against it."""
