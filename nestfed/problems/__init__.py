"""What is minimised: the four kinds of nested objective, and one file per application."""

from nestfed.problems.base import Ball, Box, Compositional, Conditional, Minimax, Minimize, Simplex

__all__ = ["Ball", "Box", "Compositional", "Conditional", "Minimax", "Minimize", "Simplex"]
