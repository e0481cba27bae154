"""The user's LightningModule inside federated training."""
