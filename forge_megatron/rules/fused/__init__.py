"""Regime 1: rules that run whole in a tile's epilogue. One module, one rule, one name."""
