"""What can be seen wrong in data before a run: units, signs, shared frames, other contents on other ranks."""
