"""``python -m launch.bench``: whole training steps on one GPU, arm beside arm, one process a cell.

The protocol is Appendix C's: an arm's numbers are written down only after its update has been compared with
``torch.optim.AdamW``'s, warm-up, the median of the timed steps, the allocator's peak, clocks, temperature and power
before and after, versions and source hash. Out of memory is a result.
"""
