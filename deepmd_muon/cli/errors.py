"""The exception of the command line."""


class CommandError(ValueError):
    """An option has an invalid value, or names something that does not exist."""
