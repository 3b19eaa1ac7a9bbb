"""One head in your hands: its tensors, its map, what its edges are worth, checked."""
