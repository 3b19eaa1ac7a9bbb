"""What the numbers mean: tunnels, manifolds, dynamics, interventions, reports and the command line."""
