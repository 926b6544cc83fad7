"""Infini-attention."""
