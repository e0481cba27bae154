"""What outlives a step: the layout of weights, declared state, the clients' rows and checkpoint files."""
