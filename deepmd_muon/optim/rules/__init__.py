"""Rules of the Muon route: what happens around the orthogonalization, one file a rule."""
