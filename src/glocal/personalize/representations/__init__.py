"""Pretext tasks of a local model, beside or instead of labels (Liang et al. 2020, Figure 1)."""

from glocal.personalize.representations.adversary import adversarial
from glocal.personalize.representations.autoencoder import autoencoder
from glocal.personalize.representations.auxiliary import Auxiliary, add_auxiliary, auxiliary_only
from glocal.personalize.representations.classifier import auxiliary_classifier
from glocal.personalize.representations.jigsaw import jigsaw, shuffle_tiles

__all__ = [
    "Auxiliary",
    "add_auxiliary",
    "adversarial",
    "autoencoder",
    "auxiliary_classifier",
    "auxiliary_only",
    "jigsaw",
    "shuffle_tiles",
]
