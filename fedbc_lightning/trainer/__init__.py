"""FederatedTrainer and its arguments."""
