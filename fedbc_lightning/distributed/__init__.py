"""Several processes: how they start, meet, watch each other and stop."""
