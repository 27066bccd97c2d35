"""Exceptions of pictures and printed tables."""


class ShowError(ValueError):
    """What is to be shown is not there, or an option makes no sense for it."""


class PictureError(ShowError):
    """There is nothing to draw, or the file to draw from has other content."""
