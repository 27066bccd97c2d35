"""Checkpoints of a run: their content, how they are written, and how a run continues from them."""
