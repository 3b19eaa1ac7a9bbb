"""The one-file page of a run."""
