"""Layers, activations and their kernels, from which descriptors and fitting nets are made."""
