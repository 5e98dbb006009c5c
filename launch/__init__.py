"""The trainer: recipes, preflight, gates, torchrun and a GPT training loop on megatron-core.

Run from a checkout: ``python -m launch RECIPE [key=value ...]``.
"""
