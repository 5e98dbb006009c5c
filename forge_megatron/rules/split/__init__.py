"""Regime 2: the states are updated in a tile's epilogue, the weight from a whole matrix of them."""
