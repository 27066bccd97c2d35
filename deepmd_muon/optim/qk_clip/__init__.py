"""QK-clip (MuonClip): scale the weights of queries and keys to bound attention logits."""

from deepmd_muon.optim.qk_clip.layers import FusedQKV, LatentQK, QKClip, SeparateQK
from deepmd_muon.optim.qk_clip.recorder import LogitRecorder, max_logits

__all__ = ["FusedQKV", "LatentQK", "LogitRecorder", "QKClip", "SeparateQK", "max_logits"]
