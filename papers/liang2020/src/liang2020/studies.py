"""The paper's studies by name, for the entry point glocal.studies."""

from liang2020.fair import FAIR
from liang2020.few_labels import FEW_LABELS
from liang2020.images import CIFAR10, MNIST
from liang2020.mood import MOOD
from liang2020.rotated import ROTATED
from liang2020.vqa import VQA

STUDIES = {study.name: study for study in (MNIST, CIFAR10, ROTATED, FAIR, FEW_LABELS, MOOD, VQA)}
