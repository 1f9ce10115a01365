"""`python sweep.py +grid=chinchilla`: plan a grid of models, train and score them, and fit their laws."""

import sys

from isoflop.sweeps.entry import sweep_main

if __name__ == "__main__":
    sys.exit(sweep_main())
