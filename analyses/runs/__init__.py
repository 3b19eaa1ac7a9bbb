"""One run: made, kept, opened again."""
