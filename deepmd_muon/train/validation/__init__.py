"""Errors on validation data, during a run and at its end, and the checkpoints that are best by them."""
