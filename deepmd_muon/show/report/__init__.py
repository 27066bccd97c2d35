"""One page about a run: what it reached, where it is wrong, and whether dynamics hold."""
