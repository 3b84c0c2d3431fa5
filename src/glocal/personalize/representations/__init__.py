"""What a local model may learn from, beside or instead of labels: the data themselves, a puzzle, an adversary (Figure 1)."""

from glocal.personalize.representations.adversary import adversarial
from glocal.personalize.representations.autoencoder import autoencoder
from glocal.personalize.representations.auxiliary import Auxiliary, alone, beside
from glocal.personalize.representations.jigsaw import jigsaw, shuffled
from glocal.personalize.representations.supervised import supervised

__all__ = ["Auxiliary", "adversarial", "alone", "autoencoder", "beside", "jigsaw", "shuffled", "supervised"]
