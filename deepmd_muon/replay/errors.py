"""Errors of replay."""


class ReplayError(ValueError):
    """Fine-tuning with replay cannot begin."""
