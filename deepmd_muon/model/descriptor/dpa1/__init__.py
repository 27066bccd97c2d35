"""DPA-1: a descriptor with type embedding and attention between neighbours (`se_atten`, `se_atten_v2`)."""
