"""Triton kernels that orthogonalize."""
