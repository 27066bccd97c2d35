"""State tensors of the parameters: how they are made, loaded and kept."""
