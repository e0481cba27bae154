"""A study compares many runs that differ in method, data and seed, pair by pair."""
