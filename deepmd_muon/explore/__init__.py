"""`dp explore`: rounds of drawing structures from dynamics, labelling them and training on."""
