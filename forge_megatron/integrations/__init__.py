"""Trainers of others. Nothing here is imported by ``import forge_megatron``."""
