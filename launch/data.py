"""Megatron's indexed datasets, read by step: the position in the data is the step number."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from forge_megatron.megatron.context import on_this_rank
from launch.config import Recipe

_KEYS = ("tokens", "labels", "loss_mask", "position_ids")


def build_datasets(recipe: Recipe, tokenizer, horizon: int) -> tuple[Dataset, Dataset | None]:
    """Training and validation datasets.

    Args:
        horizon: number of training samples over which the order is drawn. It must not change when
            a run is resumed, or the order changes under it.
    """
    data = recipe.data
    per_split = None
    if not data.synthetic:
        valid = (list(data.valid), None) if data.valid else None
        weights = list(data.train_weights) if data.train_weights else None
        per_split = [(list(data.train), weights), valid, None]
    config = GPTDatasetConfig(
        random_seed=recipe.run.seed,
        sequence_length=data.sequence_length,
        blend_per_split=per_split,
        split="9,1,0" if data.synthetic else None,
        path_to_cache=data.cache or str(Path(recipe.run.dir) / "cache"),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    cls = MockGPTDataset if data.synthetic else GPTDataset
    sizes = [horizon, recipe.validation.samples if (data.valid or data.synthetic) else 0, 0]
    train, valid, _ = BlendedMegatronDatasetBuilder(cls, sizes, lambda: True, config).build()
    return train, valid


class StepSampler:
    """Batch sampler: the micro-batches of this data-parallel rank, step after step.

    A step reads ``total`` consecutive samples, taken modulo the dataset's length; micro-batch
    ``m`` of rank ``r`` has ``micro`` of them, as in Megatron's pretraining sampler.
    """

    def __init__(self, recipe: Recipe, length: int, first: int, last: int, rank: int) -> None:
        self.recipe, self.length, self.rank = recipe, length, rank
        self.first, self.last = first, last

    def _micro_batches(self, step: int) -> list[list[int]]:
        batch, ranks = self.recipe.batch, self.recipe.parallel.data
        start = step * batch.total
        samples = [i % self.length for i in range(start, start + batch.total)]
        if self.recipe.run.reorder:
            samples.reverse()
        stride = batch.micro * ranks
        own = range(self.rank * batch.micro, batch.total, stride)
        return [samples[i : i + batch.micro] for i in own]

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.first, self.last):
            yield from self._micro_batches(step)

    def __len__(self) -> int:
        return (self.last - self.first) * self.recipe.micro_batches


def _leave_signals_to_the_rank(worker: int) -> None:
    """A stop signal to the whole process group must not take the loader's processes away before the
    checkpoint; they end with the rank that reads from them."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _batches(dataset: Dataset, sampler, device: torch.device, workers: int) -> Iterator:
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        # Its own generator: the loader would otherwise draw from the one that dropout uses.
        generator=torch.Generator(),
        worker_init_fn=_leave_signals_to_the_rank,
    )
    for batch in loader:
        yield on_this_context_rank({key: batch[key].to(device, non_blocking=True) for key in _KEYS})


def on_this_context_rank(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """``[micro, sequence]`` to this rank's ``[micro, sequence / context]``."""
    place = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    return {key: on_this_rank(whole, 1, *place) for key, whole in batch.items()}


def micro_batches(
    recipe: Recipe, dataset: Dataset, device: torch.device, first: int, last: int
) -> Iterator[dict[str, Tensor]]:
    """Micro-batches of steps ``first`` to ``last - 1``: tensors ``[micro, sequence / context]`` on
    ``device``. Every tensor- and context-parallel rank reads the whole itself."""
    rank = parallel_state.get_data_parallel_rank()
    sampler = StepSampler(recipe, len(dataset), first, last, rank)
    return _batches(dataset, sampler, device, recipe.data.workers)


def validation_batches(
    recipe: Recipe, dataset: Dataset, device: torch.device, count: int
) -> Iterator[dict[str, Tensor]]:
    """The first ``count`` micro-batches of this rank's share of the validation samples."""
    rank, micro = parallel_state.get_data_parallel_rank(), recipe.batch.micro
    starts = range(rank * micro, len(dataset) - micro + 1, micro * recipe.parallel.data)
    sampler = [list(range(start, start + micro)) for start in starts[:count]]
    return _batches(dataset, sampler, device, 0)
