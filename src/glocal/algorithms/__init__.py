"""The algorithms, one paper per file; a new algorithm is one new file and its line here.

A class is the algorithm with its task and settings; the function of the same name makes the
functions of a client and of the server from an objective.
"""

from glocal.algorithms.apfl import APFL, apfl
from glocal.algorithms.fedavg import FedAvg, fedavg
from glocal.algorithms.fedprox import FedProx, fedprox
from glocal.algorithms.lg_fedavg import LGFedAvg, lg_fedavg
from glocal.algorithms.local_only import LocalOnly, local_only
from glocal.algorithms.mtl import MTL, mtl
from glocal.algorithms.task_algorithm import TaskAlgorithm

FUNCTIONS = {make.__name__: make for make in (apfl, fedavg, fedprox, lg_fedavg, local_only, mtl)}

__all__ = [
    "APFL",
    "FUNCTIONS",
    "MTL",
    "FedAvg",
    "FedProx",
    "LGFedAvg",
    "LocalOnly",
    "TaskAlgorithm",
    "apfl",
    "fedavg",
    "fedprox",
    "lg_fedavg",
    "local_only",
    "mtl",
]
