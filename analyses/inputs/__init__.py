"""From text and names to models and batches."""
