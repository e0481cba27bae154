"""Proofs that a step of the user's is a function of weights, batch and values that are compared.

A step is evaluated once, by an evaluator that understands a part of Python and refuses everything else *before* it
happens (:mod:`~fedbc_lightning.engines.recorded.proof.evaluator`). What it reads is kept
(:mod:`~fedbc_lightning.engines.recorded.proof.reads`), and each tensor operation is checked
(:mod:`~fedbc_lightning.engines.recorded.proof.operations`). A step that passes has no effect but its result. As long
as everything that was read stays the same, inputs of the same shapes give the same operations.
"""

from fedbc_lightning.engines.recorded.proof.prover import Proof, prove

__all__ = ["Proof", "prove"]
