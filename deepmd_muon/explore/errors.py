"""Exceptions of the explore room."""


class ExploreError(ValueError):
    """Rounds that cannot begin or go on: what is missing, and what to do. Finished work stays."""
