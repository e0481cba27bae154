"""How a cohort of clients is trained."""
