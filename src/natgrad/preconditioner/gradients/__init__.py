"""Gradients: averaged, stacked, preconditioned, clipped and written back."""
