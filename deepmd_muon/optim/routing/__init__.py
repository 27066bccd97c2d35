"""Which update each parameter gets, and its matrix view."""
