"""Exceptions of pictures and printed tables."""


class ShowError(ValueError):
    """The content to show does not exist, or an option does not fit it."""


class PictureError(ShowError):
    """There is nothing to draw, or the file to draw from has other content."""
