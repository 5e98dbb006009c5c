"""``python -m launch.bench``: whole training steps, arm beside arm, one process a cell, or one a rank.

The protocol is Appendix C's: an arm's numbers are written down only after its update has been compared with its judge's
(``torch.optim.AdamW``'s, or a rule's reference), warm-up, the median of the timed steps, the allocator's peak, clocks,
temperature and power before and after, versions and source hash. Out of memory is a result.
"""
