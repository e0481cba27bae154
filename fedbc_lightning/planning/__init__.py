"""Estimates the cost of a run from a few steps of its own clients."""

from fedbc_lightning.planning.plan import Plan, make_plan

__all__ = ["Plan", "make_plan"]
