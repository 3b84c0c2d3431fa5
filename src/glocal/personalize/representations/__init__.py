"""Pretext tasks of a local model, beside or instead of labels (Liang et al. 2020, Figure 1)."""

from glocal.personalize.representations.adversary import Adversary
from glocal.personalize.representations.autoencoder import Decoder
from glocal.personalize.representations.auxiliary import Auxiliary, AuxiliaryOnly
from glocal.personalize.representations.classifier import Classifier
from glocal.personalize.representations.jigsaw import Jigsaw, shuffle_tiles

__all__ = [
    "Adversary",
    "Auxiliary",
    "AuxiliaryOnly",
    "Classifier",
    "Decoder",
    "Jigsaw",
    "shuffle_tiles",
]
