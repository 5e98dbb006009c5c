"""Acts as Megatron-LM's ``pretrain_gpt.py`` (megatron-core 0.19) on the CPU over gloo; run by torchrun.

    torchrun ... megatron_pretrain.py RESULT MEGATRON_ARGUMENTS...

Writes the loss of every iteration, in full precision, to RESULT from rank 0.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from types import SimpleNamespace

os.environ["TORCHDYNAMO_DISABLE"] = "1"
RESULT = sys.argv.pop(1)

import torch  # noqa: E402  (reads the variable above)
from megatron_ranks import mesh_of_cpus  # noqa: E402

from launch import cpu  # noqa: E402


class _Event:
    def record(self, *_):
        pass

    synchronize = wait = record

    def elapsed_time(self, _other) -> float:
        return 0.0


def _training_on_cpu() -> None:
    """What ``megatron.training`` itself, beside megatron-core, asks of CUDA."""
    stream = torch.cuda.current_stream()
    torch.cuda.Stream = lambda *_, **__: stream
    torch.cuda.Event = lambda *_, **__: _Event()
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda *_: None
    torch.cuda.memory_allocated = torch.cuda.max_memory_allocated = lambda *_: 0
    torch.cuda.memory_reserved = torch.cuda.max_memory_reserved = lambda *_: 0
    torch.cuda.reset_peak_memory_stats = torch.cuda.empty_cache = lambda *_: None
    torch.cuda.memory_stats = lambda *_: {}
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(
        multi_processor_count=1, total_memory=1, name="cpu", major=9, minor=0
    )
    init = torch.distributed.init_process_group

    def gloo(backend=None, **keywords):
        keywords.pop("device_id", None)
        return init("gloo", **keywords)

    torch.distributed.init_process_group = gloo
    mesh_of_cpus()


class Tokens(torch.utils.data.Dataset):
    """Sequences that a model can learn: each token follows from the one before it."""

    def __init__(self, samples: int, length: int, vocab: int):
        self.samples, self.length, self.vocab = samples, length, vocab

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        start = torch.randint(0, self.vocab, (1,), generator=generator)
        tokens = (start + 3 * torch.arange(self.length + 1)) % self.vocab
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


def _datasets(sizes):
    from megatron.training import get_args

    args = get_args()
    return [Tokens(max(size or 0, 1), args.seq_length, args.vocab_size // 2) for size in sizes]


_datasets.is_distributed = True


def _initial_weights(chunks: list) -> list:
    """The same for every number of ranks, where none has a shard; Megatron's own are not."""
    generator = torch.Generator().manual_seed(1)
    for parameter in chunks[0].parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter.data, std=0.1, generator=generator)
    return chunks


def _loss(losses):
    total, tokens = losses.float().sum(), torch.tensor(losses.numel(), dtype=torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach().clone(), tokens.float()])}


def _forward_step(batches, model):
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    whole = next(batches)
    whole["positions"] = torch.arange(whole["tokens"].shape[1]).expand_as(whole["tokens"]).contiguous()
    group = parallel_state.get_context_parallel_group()
    batch = get_batch_on_this_cp_rank(whole, is_hybrid_cp=False, cp_group=group)
    losses = model(batch["tokens"], batch["positions"], None, labels=batch["labels"])
    return losses, partial(_loss)


def main() -> None:
    cpu.enable("cpu")
    _training_on_cpu()
    from megatron.core.datasets import utils
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import transformer_block
    from megatron.training import pretrain, training
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from forge_megatron.megatron.arguments import add_forge_args
    from forge_megatron.megatron.training import forge_pretrain_hooks
    from launch.norm import norm_class

    utils.compile_helpers = lambda: None  # the index builder of datasets that are not used here
    args = parse_and_validate_args(extra_args_provider=add_forge_args)
    model_config = gpt_config_from_args(args)

    def layer_spec(config):
        spec = get_gpt_layer_local_spec(normalization=config.transformer.normalization)
        norm = norm_class(config.transformer.normalization)
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
        return spec

    if args.context_parallel_size == 1:
        model_config.transformer_layer_spec = layer_spec
    if args.tensor_model_parallel_size == 1:
        model_config.pre_wrap_hooks = [*model_config.pre_wrap_hooks, _initial_weights]
    transformer_block.LayerNormImpl = norm_class(args.normalization)
    forge_pretrain_hooks(args, model_config=model_config)

    history = {"losses": [], "norms": [], "skipped": 0, "owned": 0, "sharded": 0}
    train_step = training.train_step

    def recorded(*positional, **keywords):
        result = train_step(*positional, **keywords)
        history["losses"].append(float(result[0]["lm loss"]))
        history["norms"].append(float(result[5]))
        history["skipped"] += result[1]
        return result

    def counted(*positional, **keywords):
        model, optimizer, scheduler = setup(*positional, **keywords)
        for inner in optimizer.chained_optimizers:
            if hasattr(inner, "forge"):
                history["owned"] += len(inner.forge.owned)
                history["sharded"] += sum(row.how.startswith("sharded") for row in inner.forge.coverage)
        return model, optimizer, scheduler

    setup, training.setup_model_and_optimizer = training.setup_model_and_optimizer, counted
    training.train_step = recorded
    training.initialize_megatron = partial(training.initialize_megatron, allow_no_cuda=True)
    rank = int(os.environ["RANK"])
    try:
        pretrain(
            pretrain_cfg_container_from_args(args, model_config),
            _datasets,
            ModelType.encoder_or_decoder,
            _forward_step,
        )
    finally:  # --exit-interval ends the process
        if rank == 0:
            with open(RESULT, "w") as file:
                json.dump(history, file)


if __name__ == "__main__":
    main()
