"""The algorithms, one paper per file; a new algorithm is one new file and its line here."""

from glocal.algorithms.apfl import APFL
from glocal.algorithms.contract import Algorithm, State, Update, Uploads
from glocal.algorithms.fedavg import FedAvg
from glocal.algorithms.fedprox import FedProx
from glocal.algorithms.lg_fedavg import LGFedAvg
from glocal.algorithms.local_only import LocalOnly
from glocal.algorithms.mtl import MTL

ALGORITHMS: tuple[type[Algorithm], ...] = (FedAvg, FedProx, LGFedAvg, LocalOnly, MTL, APFL)

__all__ = [
    "ALGORITHMS",
    "APFL",
    "MTL",
    "Algorithm",
    "FedAvg",
    "FedProx",
    "LGFedAvg",
    "LocalOnly",
    "State",
    "Update",
    "Uploads",
]
