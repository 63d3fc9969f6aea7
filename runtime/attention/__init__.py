"""Attention over sharded rows: backends, strategies, merges."""
