"""Triton kernels of the layers of DPA-3, with their launches and operators."""
