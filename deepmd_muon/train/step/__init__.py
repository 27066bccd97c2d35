"""One training step: eager, captured or compiled, and the guard that keeps bad numbers out of the weights."""
