"""The exception of the command line."""


class CommandError(ValueError):
    """An option whose value makes no sense, or that names something that is not there."""
