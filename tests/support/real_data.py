"""Tests of real data sets run where GLOCAL_DATA names a folder that holds them."""

import os
from pathlib import Path

import pytest

# read when tests are collected: a test may change the variable
REAL_DATA = Path(os.environ.get("GLOCAL_DATA") or "nowhere")


def needs_data(name: str) -> pytest.MarkDecorator:
    """Skip a test where this data set is not on the machine."""
    is_there = (REAL_DATA / name).is_dir()
    return pytest.mark.skipif(not is_there, reason=f"set GLOCAL_DATA to a folder that holds {name}")
