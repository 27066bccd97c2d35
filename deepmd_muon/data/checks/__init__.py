"""Checks of data before a run: units, signs, shared frames, other contents on other ranks."""
