"""isoflop: scaling-law experiments, from a grid of runs to a law with its error."""

__version__ = "0.1.0"
