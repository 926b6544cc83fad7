"""Attention of a few new tokens over a key/value cache that is sharded across devices."""
