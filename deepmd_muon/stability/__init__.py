"""`dp check`: whether dynamics with a potential can be trusted near its data."""
