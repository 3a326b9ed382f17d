"""The same training script on Ray Train's workers, which have the variables of torchrun and a process group.

python examples/launch/on_ray.py
"""

import sys
from pathlib import Path

from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

FOLDER = str(Path(__file__).resolve().parent)


def train() -> None:
    """Train on this worker."""
    sys.path.insert(0, FOLDER)
    import launch  # noqa: PLC0415 - on the worker

    launch.main()


if __name__ == "__main__":
    TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2)).fit()
