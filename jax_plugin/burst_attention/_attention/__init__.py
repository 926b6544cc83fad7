"""Attention: on shards and on global arrays."""
