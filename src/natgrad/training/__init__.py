"""Training runs: jobs, ranks, the loop, checkpoints, searches and comparisons."""
