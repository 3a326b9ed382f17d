"""Blocks of equal size stored as one tensor: their tensors, their rows under FSDP2, their state in checkpoints."""
