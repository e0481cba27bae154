"""What one run does and leaves behind: the loop over rounds, tables, checkpoints, exports."""
