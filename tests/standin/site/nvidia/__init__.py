"""Hides NVIDIA's packages, whose CUDA runtime JAX's plugin would load."""
