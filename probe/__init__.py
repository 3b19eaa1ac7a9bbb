"""What one attention call says: the law, its statistics, and the watch that collects them."""
