"""The algorithms, one paper per file; a new algorithm is one new file and its line here."""

from glocal.algorithms.apfl import apfl
from glocal.algorithms.fedavg import fedavg
from glocal.algorithms.fedprox import fedprox
from glocal.algorithms.lg_fedavg import lg_fedavg
from glocal.algorithms.local_only import local_only
from glocal.algorithms.mtl import mtl

__all__ = ["apfl", "fedavg", "fedprox", "lg_fedavg", "local_only", "mtl"]
