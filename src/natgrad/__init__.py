"""Distributed natural-gradient training for PyTorch."""
