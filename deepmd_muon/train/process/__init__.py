"""The process of a run: signals, its end by an error, the start on a GPU, the allocator."""
