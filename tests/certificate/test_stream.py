"""Certificates as a file that grows: interrupted anywhere, it continues without losing or repeating a row."""

import json

import pytest
import torch

import lipcert
from helpers import randn
from lipcert.certificate import Certifier
from lipcert.certificate.stream import certify_to_csv, read_certificates
from lipcert.errors import NonFiniteError, ResumeError
from models import dense_chain

COUNT, BATCH = 50, 8
X, LABELS = randn(COUNT, 4).float(), torch.arange(COUNT) % 3


class Interrupted(Exception):
    pass


@pytest.fixture
def certifier():
    model = dense_chain(4, 5, 3).float()
    return Certifier(model, lipcert.bound(model, (4,)))


@pytest.fixture
def computed(monkeypatch):
    """Indices of all inputs that a certifier has computed."""
    indices = []
    original = Certifier.certify

    def counting(self, x, first=0, label=None):
        indices.extend(range(first, first + len(x)))
        return original(self, x, first, label)

    monkeypatch.setattr(Certifier, "certify", counting)
    return indices


def run(certifier, path, origin="data", count=COUNT, **options):
    batch = lambda first, last: (X[first:last], LABELS[first:last])  # noqa: E731
    return certify_to_csv(certifier, batch, count, path, origin=origin, batch_size=BATCH, **options)


def stop_at(index):
    def inspect(first, x, certificates):
        if first >= index:
            raise Interrupted

    return inspect


def test_the_file_holds_what_certify_returns(certifier, tmp_path):
    certificates = run(certifier, tmp_path / "c.csv")
    lines = (tmp_path / "c.csv").read_text().splitlines()
    assert lines[0] == "idx,label,prediction,margin,radius"
    assert len(lines) == COUNT + 1
    read = read_certificates(tmp_path / "c.csv", "deterministic")
    direct = certifier.certify(X, 0, LABELS)
    for other in (read, certificates):
        assert torch.equal(other.prediction, direct.prediction)
        assert torch.equal(other.label, LABELS)
        torch.testing.assert_close(other.radius, direct.radius, rtol=1e-5, atol=1e-7)
    assert torch.equal(read.radius, certificates.radius)  # every digit
    assert torch.equal(read.margin, certificates.margin)
    assert read.guarantee == "deterministic"


@pytest.mark.parametrize("index", [0, 16, 48])
def test_interrupted_and_continued(certifier, computed, tmp_path, index):
    whole = run(certifier, tmp_path / "whole.csv")
    computed.clear()
    with pytest.raises(Interrupted):
        run(certifier, tmp_path / "c.csv", inspect=stop_at(index))
    assert len((tmp_path / "c.csv").read_text().splitlines()) == 1 + index
    continued = run(certifier, tmp_path / "c.csv")
    assert (tmp_path / "c.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert torch.equal(continued.radius, whole.radius)
    written = list(range(index)) + computed[-(COUNT - index) :]
    assert written == list(range(COUNT))
    computed.clear()
    assert torch.equal(run(certifier, tmp_path / "c.csv").radius, whole.radius)
    assert computed == []


def test_interrupted_between_writing_and_reporting(certifier, computed, tmp_path):
    def progress(what, fraction):
        if fraction > 0.5:
            raise Interrupted

    run(certifier, tmp_path / "whole.csv")
    computed.clear()
    with pytest.raises(Interrupted):
        run(certifier, tmp_path / "c.csv", progress=progress)
    run(certifier, tmp_path / "c.csv")
    assert computed == list(range(COUNT))
    assert (tmp_path / "c.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


@pytest.mark.parametrize("lost", [1, 7, 100])
def test_a_half_written_row_is_written_again(certifier, computed, tmp_path, lost):
    run(certifier, tmp_path / "whole.csv")
    run(certifier, tmp_path / "c.csv")
    complete = (tmp_path / "whole.csv").read_text()
    (tmp_path / "c.csv").write_text(complete[:-lost])
    kept = complete[:-lost].count("\n") - 1
    computed.clear()
    run(certifier, tmp_path / "c.csv")
    assert computed == list(range(kept, COUNT))
    again, whole = read_certificates(tmp_path / "c.csv"), read_certificates(tmp_path / "whole.csv")
    assert torch.equal(again.prediction, whole.prediction)
    torch.testing.assert_close(again.radius, whole.radius, rtol=1e-5, atol=1e-7)
    assert (tmp_path / "c.csv").read_text().splitlines()[: kept + 1] == complete.splitlines()[: kept + 1]


def test_more_inputs_extend_a_file_and_fewer_are_refused(certifier, computed, tmp_path):
    run(certifier, tmp_path / "c.csv", count=16)
    run(certifier, tmp_path / "c.csv", count=24)
    assert computed == list(range(24))
    with pytest.raises(ResumeError, match="holds 24 certificates, more than 10; choose another folder"):
        run(certifier, tmp_path / "c.csv", count=10)
    assert computed == list(range(24))


def test_a_refused_input_leaves_the_rows_before_it(certifier, tmp_path):
    bad = X.clone()
    bad[20] = torch.nan
    with pytest.raises(NonFiniteError, match="input 20 contains NaN"):
        certify_to_csv(
            certifier, lambda a, b: (bad[a:b], LABELS[a:b]), COUNT, tmp_path / "c.csv", origin="data", batch_size=BATCH
        )
    assert len(read_certificates(tmp_path / "c.csv")) == 16


def test_files_of_other_weights_or_data_are_refused(certifier, tmp_path):
    run(certifier, tmp_path / "c.csv")
    before = (tmp_path / "c.csv").read_bytes()
    other = dense_chain(4, 5, 3, seed=1).float()
    message = "of other weights or data, or by another method; remove it or choose another folder"
    with pytest.raises(ResumeError, match=message):
        run(Certifier(other, lipcert.bound(other, (4,))), tmp_path / "c.csv")
    with pytest.raises(ResumeError, match=message):
        run(certifier, tmp_path / "c.csv", origin="other data")
    (tmp_path / "c.origin.json").write_text("{")
    with pytest.raises(ResumeError, match=message):
        run(certifier, tmp_path / "c.csv")
    (tmp_path / "c.origin.json").unlink()
    with pytest.raises(ResumeError, match=r"exists, but not c.origin.json that says what it holds"):
        run(certifier, tmp_path / "c.csv")
    assert (tmp_path / "c.csv").read_bytes() == before


DAMAGE = {
    "header": lambda lines: ["a,b,c", *lines[1:]],
    "empty": lambda lines: [],
    "missing row": lambda lines: lines[:5] + lines[6:],
    "repeated row": lambda lines: [*lines, lines[-1]],
    "missing column": lambda lines: [*lines[:-1], "49,1,2,0.5"],
    "text for a number": lambda lines: [*lines[:-1], "49,1,two,0.5,0.1"],
    "not a number": lambda lines: [*lines[:-1], "49,1,2,0.5,nan"],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_refused(certifier, tmp_path, name):
    run(certifier, tmp_path / "c.csv")
    lines = (tmp_path / "c.csv").read_text().splitlines()
    (tmp_path / "c.csv").write_text("".join(line + "\n" for line in DAMAGE[name](lines)))
    with pytest.raises(ResumeError, match="the certificates file is damaged: expected the columns idx, label"):
        run(certifier, tmp_path / "c.csv")


def test_what_a_file_holds_is_written_beside_it(certifier, tmp_path):
    run(certifier, tmp_path / "c.csv", origin="digits 1234")
    mark = json.loads((tmp_path / "c.origin.json").read_text())
    assert mark == {"fingerprint": certifier.bound.facts.fingerprint, "origin": "digits 1234"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.csv", "c.origin.json"]
