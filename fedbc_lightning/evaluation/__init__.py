"""How models are evaluated on the clients' data."""
