"""Pytest fixtures shipped with the package."""
