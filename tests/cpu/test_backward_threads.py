"""A backward beside what another thread does."""

import threading
import time

import torch

from forge_megatron.linear import ledger
from tests.cpu.training import Pair, batch, mean_square, mlp


def test_another_thread_may_run_a_forward_during_backward():
    """It must not take the running backward for a failed one, nor lose a use."""
    pair = Pair(mlp(6, 8, 4), waiting=True)
    x = batch(5, 6)
    release, entered = threading.Event(), threading.Event()

    def pause(grad):
        entered.set()
        assert release.wait(10)

    hidden = pair.model[1](pair.model[0](x))
    hidden.register_hook(pause)
    loss = pair.model[2](hidden).square().mean()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    assert entered.wait(10)
    with torch.no_grad():
        pair.model(x)
    pair.model(x)
    release.set()
    thread.join()
    pair.twin(x).square().mean().backward()
    pair.close()
    pair.expect_equal()


def test_two_models_train_in_two_threads(monkeypatch):
    def raise_slowly(counts):
        # Time for the other thread, whose own counts these are not.
        time.sleep(0.002)
        counts_raised(counts)
        time.sleep(0.002)

    counts_raised = ledger.raise_counts
    monkeypatch.setattr(ledger, "raise_counts", raise_slowly)
    pairs = [Pair(mlp(6, 8, 4, seed=seed)) for seed in range(2)]
    errors = []

    def train(pair):
        try:
            for seed in range(20):
                pair.train(mean_square(batch(5, 6, seed=seed)))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(pair,)) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for pair in pairs:
        pair.expect_equal()
