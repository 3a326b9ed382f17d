"""Gradients on their way: averaged, stacked, preconditioned, clipped, given back."""
