"""One training step, eager or captured, and the guard that keeps bad numbers out."""
