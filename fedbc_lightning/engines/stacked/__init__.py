"""Many clients at once: one mapped step for all of them."""
