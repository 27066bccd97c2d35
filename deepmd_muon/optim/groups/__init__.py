"""Parameter groups: their settings, checks of their parameters, and the routes of these."""
