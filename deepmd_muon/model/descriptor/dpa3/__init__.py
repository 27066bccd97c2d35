"""The graph descriptor DPA-3 (Zhang et al., arXiv:2506.01686)."""
