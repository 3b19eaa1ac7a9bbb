"""Bayesian wind tunnels: tasks whose exact posterior is known at every position."""
