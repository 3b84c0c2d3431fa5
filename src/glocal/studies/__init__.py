"""Experiments as values: settings, the paper's models, and what makes them run."""

from glocal.studies.models import lenet5, mlp
from glocal.studies.named import STUDIES
from glocal.studies.run import Step, run_study
from glocal.studies.settings import Settings, changed, from_toml

__all__ = ["STUDIES", "Settings", "Step", "changed", "from_toml", "lenet5", "mlp", "run_study"]
