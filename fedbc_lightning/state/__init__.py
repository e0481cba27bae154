"""State that outlives a local step: parameter layout, declared state, the clients' rows and checkpoint files."""
