"""Proofs that a step of the user's is a function of weights, batch and values that are compared.

A step is evaluated once, by an evaluator that understands a part of Python and refuses everything else *before* it
happens (:mod:`~fedbc_lightning.engines.recorded.proof.evaluator`). What it reads is taken down
(:mod:`~fedbc_lightning.engines.recorded.proof.reads`); tensors are looked at operation by operation
(:mod:`~fedbc_lightning.engines.recorded.proof.operations`). A step that comes through has no effect but its result,
and as long as all that was read is the same, the same shapes give the same operations.
"""

from fedbc_lightning.engines.recorded.proof.prover import Proof, prove

__all__ = ["Proof", "prove"]
