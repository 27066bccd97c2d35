"""Errors on validation data during a run, and the checkpoints that are best by them."""
