"""Attention of this package inside trainers that others wrote, a module for each trainer.

No module imports its trainer before it is used.
"""
