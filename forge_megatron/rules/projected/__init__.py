"""Adam on a projection of the gradient, formed from the gradient's factors: FORGE's "outside the contract".

:mod:`..projection` has what the rules here share.
"""
