"""The command line: `dp`, `dpmuon` and `python -m deepmd_muon`. Nothing imports this package."""
