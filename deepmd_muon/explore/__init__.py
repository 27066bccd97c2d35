"""`dp explore`: the potential's own dynamics draws structures, which are chosen, labelled and trained on, in rounds."""
