"""What people read of a run: tables, plots, one HTML page."""
