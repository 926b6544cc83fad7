"""Attention whose latents travel."""
