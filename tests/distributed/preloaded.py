"""What the processes of the tests import, once for all of them: see :mod:`tests.distributed.ranks`."""

import importlib
import importlib.util
import warnings

MODULES = [
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "forge_megatron",
    "forge_megatron.kernels",
]
MEGATRON = ["launch.train", "forge_megatron.megatron.build", "megatron.core.models.gpt.gpt_layer_specs"]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in MODULES + (MEGATRON if importlib.util.find_spec("megatron") else []):
        importlib.import_module(name)
