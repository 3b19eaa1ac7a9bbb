"""What the weights say: projections, vocabulary, attribution."""
