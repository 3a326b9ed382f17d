"""What trainers need beside `natgrad.create_optimizer`; each module imports its framework (docs/integrations)."""
