"""The round: what server and clients do in it, and which clients take part."""
