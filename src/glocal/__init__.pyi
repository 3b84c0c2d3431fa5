from glocal.algorithm import Algorithm as Algorithm
from glocal.algorithm import Update as Update
from glocal.algorithms.fedavg import fedavg as fedavg
from glocal.algorithms.fedprox import fedprox as fedprox
from glocal.algorithms.lg_fedavg import lg_fedavg as lg_fedavg
from glocal.algorithms.local_only import local_only as local_only
from glocal.algorithms.mtl import mtl as mtl
from glocal.backends.simulate import simulate as simulate
from glocal.data.augment import crop_and_flip as crop_and_flip
from glocal.data.partition import deal as deal
from glocal.data.partition import dirichlet as dirichlet
from glocal.data.partition import iid as iid
from glocal.data.partition import natural as natural
from glocal.data.partition import shards as shards
from glocal.data.sources import load as load
from glocal.errors import GlocalWarning as GlocalWarning
from glocal.errors import InputError as InputError
from glocal.federation import Federation as Federation
from glocal.federation import from_tensors as from_tensors
from glocal.fitting import Options as Options
from glocal.fitting import fit as fit
from glocal.modules import params_of as params_of
from glocal.optimisers import adam as adam
from glocal.optimisers import sgd as sgd
from glocal.result import Result as Result
from glocal.sampling import Plan as Plan
from glocal.sampling import stream as stream
from glocal.split import Split as Split
from glocal.split import first_layers as first_layers
from glocal.split import last_layers as last_layers
from glocal.training import Objective as Objective
from glocal.training import augmented as augmented
from glocal.training import cross_entropy as cross_entropy
from glocal.training import pulled as pulled
from glocal.training import supervised as supervised

__version__: str
__all__: list[str]
