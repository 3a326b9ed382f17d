"""What travels of sharded parameters (FSDP2)."""
