"""The route of each parameter (the update that it takes), and its matrix view."""
