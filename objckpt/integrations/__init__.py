"""Adapters to other libraries and their files."""
