"""FederatedTrainer and the checks of its arguments."""
