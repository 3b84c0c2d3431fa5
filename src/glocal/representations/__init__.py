"""What a local model may learn from, beside or instead of labels: the data themselves, a puzzle, an adversary (Figure 1)."""

from glocal.representations.adversary import adversarial
from glocal.representations.autoencoder import autoencoder
from glocal.representations.auxiliary import Auxiliary, alone, beside
from glocal.representations.jigsaw import jigsaw, shuffled
from glocal.representations.supervised import supervised

__all__ = ["Auxiliary", "adversarial", "alone", "autoencoder", "beside", "jigsaw", "shuffled", "supervised"]
