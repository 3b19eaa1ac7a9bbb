"""EM against SGD on the sticky chain: what a speed-up has to survive."""
