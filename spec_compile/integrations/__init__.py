"""Bridges to other projects: each is imported on its own, and needs that project's package."""
