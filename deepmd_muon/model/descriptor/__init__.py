"""Descriptors: what an atom sees of its neighbourhood."""
