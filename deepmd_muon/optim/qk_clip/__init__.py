"""QK-clip (MuonClip): attention logits kept below a threshold by scaling the rows that make queries and keys."""

from deepmd_muon.optim.qk_clip.layers import FusedQKV, LatentQK, QKClip, SeparateQK
from deepmd_muon.optim.qk_clip.recorder import LogitRecorder, max_logits

__all__ = ["FusedQKV", "LatentQK", "LogitRecorder", "QKClip", "SeparateQK", "max_logits"]
