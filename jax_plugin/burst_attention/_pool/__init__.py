"""Caches on devices apart from those of the model."""
