"""The smooth two-body embedding descriptor `se_e2_a`."""
