"""Which frames make a batch, and which are held out."""
