"""Studies of several parts, which installed packages offer as entry points, group glocal.studies.

In the package's pyproject.toml::

    [project.entry-points."glocal.studies"]
    anything = "my_package.studies:STUDIES"

where STUDIES is a Study or a mapping of names to Studies.
"""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from glocal.core.errors import InputError, describe_error, suggest_name
from glocal.studies.builtin import STUDIES
from glocal.studies.study import Study

GROUP = "glocal.studies"
# packages of this repository: where they are in it
_PACKAGES = {"glocal-liang2020": "papers/liang2020"}


def installed_studies() -> dict[str, Study]:
    """Every study that an installed package offers, by name."""
    studies: dict[str, Study] = {}
    packages = dict.fromkeys(STUDIES, "glocal")
    for point in entry_points(group=GROUP):
        package = _package_of(point)
        for name, study in _load(point).items():
            if name in packages:
                raise InputError(
                    f"study: '{name}' is in two packages, {packages[name]} and {package}; "
                    "uninstall one of them"
                )
            packages[name] = package
            studies[name] = study
    return studies


def find_study(name: object) -> Study:
    """The study of that name."""
    studies = installed_studies()
    if not isinstance(name, str) or name not in studies:
        raise InputError(f"study: {unknown_study(str(name), studies)}")
    return studies[name]


def unknown_study(name: str, known: Mapping[str, object]) -> str:
    """Why there is no such study, in one line; with the package that may have it."""
    missing = missing_packages()
    advice = f"; {missing}" if missing else ""
    return f"there is no study '{name}'; {suggest_name(name, known)}{advice}"


def missing_packages() -> str:
    """How to get the packages of studies that are not installed; empty if all are."""
    installed = {_package_of(point) for point in entry_points(group=GROUP)}
    lines = [
        f"for the studies of papers/{folder.rpartition('/')[2]}: `pip install ./{folder}` "
        f"in glocal's repository, or `pip install {package}` once it is released"
        for package, folder in _PACKAGES.items()
        if package not in installed
    ]
    return "; ".join(lines)


def _package_of(point: EntryPoint) -> str:
    return point.value if point.dist is None else point.dist.name


def _load(point: EntryPoint) -> dict[str, Study]:
    """The studies of an entry point, by name."""
    try:
        loaded = point.load()
    except Exception as error:  # whatever a package may raise while it is imported
        raise InputError(
            f"study: the studies of {_package_of(point)} cannot be loaded "
            f"({describe_error(error)}); reinstall the package, or uninstall it"
        ) from error
    studies = {loaded.name: loaded} if isinstance(loaded, Study) else loaded
    if not isinstance(studies, Mapping) or not all(map(_is_study, studies.values())):
        raise InputError(
            f"study: {_package_of(point)} offers {point.value}, which is neither a Study nor a "
            "mapping of names to Studies; uninstall the package, or mend it"
        )
    return dict(studies)


def _is_study(value: object) -> bool:
    return isinstance(value, Study)
