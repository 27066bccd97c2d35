"""Exceptions of pictures and printed tables."""


class ShowError(ValueError):
    """The content to show does not exist, or an option does not suit it."""


class PictureError(ShowError):
    """There is nothing to draw, a file has other content, or a format is unknown."""
