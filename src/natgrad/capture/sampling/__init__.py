"""The model's own predictive distribution, and labels drawn from it."""
