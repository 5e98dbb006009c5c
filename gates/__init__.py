"""Exactness gates: each compares FORGE with a reference on this machine, prints the number and its bound, and can fail.

``python -m gates`` runs them and writes a receipt; ``python -m launch`` starts no job that a receipt does not cover.
"""
