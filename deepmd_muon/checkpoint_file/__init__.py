"""The files of checkpoints, ours and deepmd-kit's: read without running anything that they hold."""
