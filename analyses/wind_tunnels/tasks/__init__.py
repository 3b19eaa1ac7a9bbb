"""The tasks, each with its exact posterior."""
