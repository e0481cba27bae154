"""Runs with several processes: how the processes start, find each other, exchange tensors, and stop together."""
