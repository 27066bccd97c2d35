"""Checkpoint files, ours and deepmd-kit's, read without running any code in them."""
