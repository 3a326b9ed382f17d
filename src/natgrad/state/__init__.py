"""Blocks of equal size as stacked tensors, their rows under FSDP2, and their state in checkpoints."""
