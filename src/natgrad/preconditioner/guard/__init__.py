"""Reactions to numerical failures, and to layers that are used in unexpected ways."""
