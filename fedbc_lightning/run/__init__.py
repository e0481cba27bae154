"""One run: the loop over rounds, its tables, checkpoints and exports."""
