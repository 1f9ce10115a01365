"""Which runs, in what order, where, and in what state. Knows nothing of how a step is computed."""
