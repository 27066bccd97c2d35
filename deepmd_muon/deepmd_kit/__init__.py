"""HybridMuon inside deepmd-kit's own trainers, opted in by DEEPMD_MUON=1; see doc/coming-from.md.

deepmd-kit imports `entry`, which calls `activation`; these import nothing heavy. The other modules
are imported after deepmd-kit has imported one of its trainers.
"""
