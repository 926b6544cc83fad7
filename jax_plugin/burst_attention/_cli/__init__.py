"""The commands of ``python -m burst_attention``."""
