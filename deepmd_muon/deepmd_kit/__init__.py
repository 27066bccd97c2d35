"""HybridMuon inside deepmd-kit's own trainers, for those who set DEEPMD_MUON=1; see doc/deepmd-kit.md.

deepmd-kit loads `entry`. It asks `activation`, which imports nothing heavy; `trainer`, `optimizer`,
`zero_redundancy`, `checkpoint` and `settings` are imported when deepmd-kit has imported one of its trainers.
"""
