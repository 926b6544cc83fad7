"""The ring on a GPU, part by part; ../gpu_check.py is the command."""
