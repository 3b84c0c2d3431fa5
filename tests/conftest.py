"""Tests run with one thread each: small steps gain nothing from more."""

import sys

import pytest
import torch
from hypothesis import settings

# The same examples every time and no time limit, for a busy machine is no fault;
# `--hypothesis-profile default` searches further.
settings.register_profile("glocal", deadline=None, derandomize=True)
settings.load_profile("glocal")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Nothing that a test loads may come from, or end in, the user's own cache."""
    monkeypatch.setenv("GLOCAL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(autouse=True)
def no_bytecode(monkeypatch):
    """Python takes a module that changes within a second, to the same length, from its cache."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
