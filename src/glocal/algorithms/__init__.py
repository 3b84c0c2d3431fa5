"""The algorithms, one paper per file; a new algorithm is one new file and its line here."""

from glocal.algorithms.apfl import APFL
from glocal.algorithms.contract import Algorithm, State, Update, Uploads
from glocal.algorithms.ditto import Ditto
from glocal.algorithms.fedavg import FedAvg
from glocal.algorithms.fedavgm import FedAvgM
from glocal.algorithms.feddyn import FedDyn
from glocal.algorithms.fedopt import FedAdagrad, FedAdam, FedYogi
from glocal.algorithms.fedper import FedPer
from glocal.algorithms.fedproto import FedProto
from glocal.algorithms.fedprox import FedProx
from glocal.algorithms.fedrep import FedRep
from glocal.algorithms.fesem import FeSEM
from glocal.algorithms.ifca import IFCA
from glocal.algorithms.lg_fedavg import LGFedAvg
from glocal.algorithms.local_only import LocalOnly
from glocal.algorithms.mtl import MTL
from glocal.algorithms.scaffold import Scaffold

ALGORITHMS: tuple[type[Algorithm], ...] = (
    FedAvg,
    FedProx,
    LGFedAvg,
    LocalOnly,
    MTL,
    APFL,
    FedPer,
    FedRep,
    Ditto,
    Scaffold,
    FedDyn,
    FedAvgM,
    FedAdagrad,
    FedAdam,
    FedYogi,
    FedProto,
    IFCA,
    FeSEM,
)

__all__ = [
    "ALGORITHMS",
    "APFL",
    "IFCA",
    "MTL",
    "Algorithm",
    "Ditto",
    "FeSEM",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedDyn",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRep",
    "FedYogi",
    "LGFedAvg",
    "LocalOnly",
    "Scaffold",
    "State",
    "Update",
    "Uploads",
]
