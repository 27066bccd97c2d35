"""Rules of the Muon route, which act before and after the orthogonalization; one file per rule."""
