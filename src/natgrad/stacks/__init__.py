"""Blocks of equal size, stored as one: which layers, whose work, in which dtypes, kept where."""
