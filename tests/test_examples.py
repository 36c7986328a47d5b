"""The examples in the docstrings of everything that `lipcert` exports run, and give what they say."""

import doctest
import inspect
import warnings

import pytest
import torch
from torch import nn

import lipcert

WITHOUT = {
    "NormOptions",
    "TrainConfig",
    "resume",
    "sweep",
    "train",
}  # the pages in docs/ have theirs
EXPORTED = [
    name for name in lipcert.__all__ if not inspect.ismodule(getattr(lipcert, name))
]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def examples(text, name):
    names = {"lipcert": lipcert, "torch": torch, "nn": nn}
    return doctest.DocTestParser().get_doctest(text, names, name, None, 0)


def failures(test):
    """What does not run, or gives something else."""
    told = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        doctest.DocTestRunner(optionflags=FLAGS).run(test, out=told.append)
    return "".join(told)


@pytest.mark.parametrize("name", sorted(set(EXPORTED) - WITHOUT))
def test_the_example_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    test = examples(inspect.getdoc(getattr(lipcert, name)), name)
    assert test.examples, f"lipcert.{name} has no example"
    assert failures(test) == ""


def test_a_wrong_example_would_be_found():
    assert "Expected:\n    3" in failures(examples(">>> 1 + 1\n3\n", "sum"))
    assert "NameError" in failures(examples(">>> no_such_name\n", "name"))
