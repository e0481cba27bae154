"""What happens in a round, and who takes part in it."""
