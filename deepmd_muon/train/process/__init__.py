"""The process a run lives in: signals, its end by an error, the start on a GPU, the allocator of the host."""
