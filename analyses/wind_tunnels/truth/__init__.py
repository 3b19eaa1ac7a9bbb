"""Models held against the exact posterior."""
