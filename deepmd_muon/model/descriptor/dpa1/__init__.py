"""DPA-1: type embedding, and attention between neighbours (`se_atten`, `se_atten_v2`)."""
