"""Studies: many runs that differ in method, data and seed, compared pair by pair."""
