"""One run: a config in, a run directory out. Knows nothing of grids, schedulers or other runs."""
