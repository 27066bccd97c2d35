"""Pictures and printed tables: learning curves, parity, spectra, plans, weights."""
