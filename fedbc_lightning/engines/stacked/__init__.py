"""Many clients at once: one mapped step for all of them.

Three words for three things: rows and batches of K clients are *stacked* under one another, a step is *mapped* over
them by ``torch.func.vmap``, and the engine that does so is the *vectorized* one, as ``trainer.engine`` calls it.
"""
