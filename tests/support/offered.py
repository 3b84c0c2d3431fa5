"""Studies as an installed package would offer them."""

from types import SimpleNamespace

from glocal.studies import registry


def offer_studies(monkeypatch, *studies, package="a-package"):
    """Make these studies the only ones of an installed package."""
    point = entry_point({study.name: study for study in studies}, package)
    monkeypatch.setattr(registry, "entry_points", lambda group: (point,))


def entry_point(value, package):
    """An entry point that gives a value, or that raises it."""

    def load():
        if isinstance(value, Exception):
            raise value
        return value

    dist = SimpleNamespace(name=package)
    return SimpleNamespace(value=f"{package}:STUDIES", dist=dist, load=load)
