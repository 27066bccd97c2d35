"""State tensors of the parameters: creating, loading, migrating and offloading them."""
