"""Figures and tables of the source papers."""
