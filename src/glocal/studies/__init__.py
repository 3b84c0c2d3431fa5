"""Studies: settings, the paper's models, and the code that runs experiments."""

from glocal.studies.builtin import STUDIES
from glocal.studies.models import lenet5, mlp
from glocal.studies.run import StudyEvent, run_study
from glocal.studies.settings import Settings, from_toml, with_overrides

__all__ = [
    "STUDIES",
    "Settings",
    "StudyEvent",
    "from_toml",
    "lenet5",
    "mlp",
    "run_study",
    "with_overrides",
]
