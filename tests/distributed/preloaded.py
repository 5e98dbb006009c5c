"""What the processes of the tests import, once for all of them: see :mod:`tests.distributed.ranks`."""

import gc
import importlib
import importlib.util
import queue
import warnings

MODULES = [
    "pytest",  # a third of a second in each process
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "forge_megatron",
    "forge_megatron.kernels",
]
MEGATRON = ["launch.train", "forge_megatron.megatron.build", "megatron.core.models.gpt.gpt_layer_specs"]
WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in MODULES:
        importlib.import_module(name)
    if importlib.util.find_spec("megatron"):
        for name in MEGATRON:
            importlib.import_module(name)
        # Where Megatron's writer leaves its results: else the first save of each rank starts a process for it that
        # imports torch anew. Writer and reader are one process unless the save is asynchronous, which no test's is;
        # the ranks that torchrun starts (test_trainer_stop.py) keep Megatron's own.
        importlib.import_module(WRITER)._results_queue = queue.Queue()

# What is imported stays: a collection, of which tests ask for many, looks at what a process has made since.
gc.freeze()
