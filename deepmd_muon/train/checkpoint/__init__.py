"""Checkpoints of a run: what they hold, how they are written, and how a run continues from them."""
