"""Descriptors: representations of an atom's neighbourhood."""
