"""Weights arrive once, whole and checked, by a unit of the node that needs nobody to watch it."""
