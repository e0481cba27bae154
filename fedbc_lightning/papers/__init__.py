"""Computes the figures and tables of the source papers."""
