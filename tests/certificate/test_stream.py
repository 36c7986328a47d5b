"""Certificates as a file that grows: interrupted anywhere, it continues without losing or repeating a row."""

import hashlib
import json

import pytest
import torch

import lipcert
from helpers import certifier_of, randn
from lipcert.certificate import Certifier, stream
from lipcert.certificate.stream import certify_to_csv, read_certificates
from lipcert.errors import NonFiniteError, ResumeError
from models import dense_chain

COUNT, BATCH = 50, 8
X, LABELS = randn(COUNT, 4).float(), torch.arange(COUNT) % 3


class Interrupted(Exception):
    pass


@pytest.fixture(scope="module")
def certifier():
    model = dense_chain(4, 5, 3).float()
    return certifier_of(model, (4,))


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


def run(certifier, path, origin="data", count=COUNT, stop=COUNT, **options):
    def certify(x, first, label):
        certificates = certifier.certify(x, first, label)
        if first >= stop:
            raise Interrupted
        return certificates

    batch = lambda first, last: (X[first:last], LABELS[first:last])  # noqa: E731
    where = {"origin": origin, "batch_size": BATCH}
    return certify_to_csv(
        certify, certifier.bound, batch, count, path, **where, **options
    )


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
        run(certifier, tmp_path / "c.csv", stop=index)
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


@pytest.mark.parametrize("more", [1, 7, 100, 1000])
def test_rows_after_the_checksum_are_written_again(certifier, computed, tmp_path, more):
    run(certifier, tmp_path / "whole.csv")
    with pytest.raises(Interrupted):
        run(certifier, tmp_path / "c.csv", stop=24)
    whole, kept = (
        (tmp_path / "whole.csv").read_bytes(),
        (tmp_path / "c.csv").stat().st_size,
    )
    (tmp_path / "c.csv").write_bytes(whole[: kept + more])
    assert len(read_certificates(tmp_path / "c.csv")) == 24
    computed.clear()
    run(certifier, tmp_path / "c.csv")
    assert computed == list(range(24, COUNT))
    assert (tmp_path / "c.csv").read_bytes() == whole


def test_killed_between_the_rows_and_their_checksum(
    certifier, computed, tmp_path, monkeypatch
):
    def killed(path, fingerprint, origin, rows, sha256):
        if rows > 24:
            raise Interrupted
        original(path, fingerprint, origin, rows, sha256)

    run(certifier, tmp_path / "whole.csv")
    original = stream._write_origin
    monkeypatch.setattr(stream, "_write_origin", killed)
    with pytest.raises(Interrupted):
        run(certifier, tmp_path / "c.csv")
    monkeypatch.setattr(stream, "_write_origin", original)
    assert len((tmp_path / "c.csv").read_text().splitlines()) == 1 + 32
    computed.clear()
    run(certifier, tmp_path / "c.csv")
    assert computed == list(range(24, COUNT))
    assert (tmp_path / "c.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_killed_before_the_header(certifier, tmp_path):
    run(certifier, tmp_path / "c.csv")
    whole = (tmp_path / "c.csv").read_bytes()
    (tmp_path / "c.csv").unlink()
    run(certifier, tmp_path / "c.csv")
    assert (tmp_path / "c.csv").read_bytes() == whole


def test_more_inputs_extend_a_file_and_fewer_are_refused(certifier, computed, tmp_path):
    run(certifier, tmp_path / "c.csv", count=16)
    run(certifier, tmp_path / "c.csv", count=24)
    assert computed == list(range(24))
    with pytest.raises(
        ResumeError, match="holds 24 certificates, more than 10; choose another folder"
    ):
        run(certifier, tmp_path / "c.csv", count=10)
    assert computed == list(range(24))


def test_a_refused_input_leaves_the_rows_before_it(certifier, tmp_path):
    bad = X.clone()
    bad[20] = torch.nan
    with pytest.raises(NonFiniteError, match="input 20 contains NaN"):
        certify_to_csv(
            certifier.certify,
            certifier.bound,
            lambda a, b: (bad[a:b], LABELS[a:b]),
            COUNT,
            tmp_path / "c.csv",
            origin="data",
            batch_size=BATCH,
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
    for damaged in ("{", "[1]", '{"rows": "1", "sha256": "0"}'):
        (tmp_path / "c.origin.json").write_text(damaged)
        with pytest.raises(
            ResumeError,
            match=r"c.origin.json is damaged; remove it and c.csv and certify again",
        ):
            run(certifier, tmp_path / "c.csv")
        with pytest.raises(ResumeError, match=r"c.origin.json is damaged"):
            read_certificates(tmp_path / "c.csv")
    (tmp_path / "c.origin.json").unlink()
    with pytest.raises(
        ResumeError, match=r"exists, but not c.origin.json that says what it holds"
    ):
        run(certifier, tmp_path / "c.csv")
    assert (tmp_path / "c.csv").read_bytes() == before


def without_checksum(path):
    """Leave what earlier versions wrote."""
    mark = json.loads(path.with_suffix(".origin.json").read_text())
    path.with_suffix(".origin.json").write_text(
        json.dumps({key: mark[key] for key in ("fingerprint", "origin")})
    )


def test_files_of_earlier_versions_are_read_but_not_continued(certifier, tmp_path):
    radius = run(certifier, tmp_path / "c.csv", count=16).radius
    without_checksum(tmp_path / "c.csv")
    assert torch.equal(read_certificates(tmp_path / "c.csv").radius, radius)
    with pytest.raises(
        ResumeError,
        match=r"c\.csv was written by an earlier version of lipcert, .*; remove it or choose",
    ):
        run(certifier, tmp_path / "c.csv")
    (tmp_path / "c.origin.json").unlink()
    assert torch.equal(read_certificates(tmp_path / "c.csv").radius, radius)
    (tmp_path / "c.csv").unlink()
    assert len(run(certifier, tmp_path / "c.csv")) == COUNT


def cell(column, value):
    """Another value in the last row."""

    def edit(lines):
        values = lines[-1].split(",")
        values[column] = value
        return [*lines[:-1], ",".join(values)]

    return edit


def exchanged(lines):
    """Rows 3 and 4 with each other's contents, numbered correctly."""
    three, four = (line.split(",", 1)[1] for line in lines[4:6])
    return [*lines[:4], f"3,{four}", f"4,{three}", *lines[6:]]


EDITED = {
    "larger radius": cell(4, "7.5"),
    "another label": cell(1, "0"),
    "another prediction": cell(2, "5"),
    "larger margin": cell(3, "99.0"),
    "last row removed": lambda lines: lines[:-1],
    "half of the last row removed": lambda lines: [*lines[:-1], lines[-1][:5]],
    "all rows removed": lambda lines: lines[:1],
    "rows exchanged": exchanged,
    "one digit less": lambda lines: [*lines[:-1], lines[-1][:-1]],
}
DAMAGE = {
    "header": lambda lines: ["a,b,c", *lines[1:]],
    "empty": lambda lines: [],
    "missing row": lambda lines: lines[:5] + lines[6:],
    "reordered rows": lambda lines: [lines[0], *lines[:0:-1]],
    "missing column": lambda lines: [*lines[:-1], "49,1,2,0.5"],
    "one more column": lambda lines: [*lines[:-1], "49,1,2,0.5,0.1,0"],
    "text for a number": cell(2, "two"),
    "fraction for a class": cell(1, "0.5"),
    "negative label": cell(1, "-1"),
    "negative prediction": cell(2, "-1"),
    "class beyond all numbers": cell(2, str(2**63)),
    "radius is not a number": cell(4, "nan"),
    "infinite radius": cell(4, "inf"),
    "negative radius": cell(4, "-0.1"),
    "margin is not a number": cell(3, "nan"),
    "infinite margin": cell(3, "inf"),
    "negative margin": cell(3, "-0.1"),
}


def rewrite(path, change):
    text = "".join(line + "\n" for line in change(path.read_text().splitlines()))
    path.write_text(text)
    return text.encode()


@pytest.mark.parametrize("name", [*EDITED, *DAMAGE])
def test_edited_files_are_neither_continued_nor_read(
    certifier, computed, tmp_path, name
):
    run(certifier, tmp_path / "c.csv")
    computed.clear()
    edited = rewrite(tmp_path / "c.csv", (EDITED | DAMAGE)[name])
    message = (
        r"c\.csv was edited or is damaged: its first 50 rows do not have the checksum "
        r"in c\.origin\.json; remove it"
    )
    with pytest.raises(ResumeError, match=message):
        run(certifier, tmp_path / "c.csv")
    with pytest.raises(ResumeError, match=message):
        read_certificates(tmp_path / "c.csv")
    assert computed == []
    assert (tmp_path / "c.csv").read_bytes() == edited


@pytest.mark.parametrize("name", DAMAGE)
def test_rows_are_checked_without_and_with_a_checksum(certifier, tmp_path, name):
    run(certifier, tmp_path / "c.csv")
    edited = rewrite(tmp_path / "c.csv", DAMAGE[name])
    mark = json.loads((tmp_path / "c.origin.json").read_text()) | {
        "sha256": hashlib.sha256(edited).hexdigest()
    }
    (tmp_path / "c.origin.json").write_text(json.dumps(mark))
    message = r"c\.csv is damaged: expected the columns idx, label, .*; remove it and certify again"
    with pytest.raises(ResumeError, match=message):
        run(certifier, tmp_path / "c.csv")
    without_checksum(tmp_path / "c.csv")
    with pytest.raises(ResumeError, match=message):
        read_certificates(tmp_path / "c.csv")


def test_rows_that_are_no_text_are_refused(certifier, tmp_path):
    (tmp_path / "c.csv").write_bytes(
        b"idx,label,prediction,margin,radius\n0,1,1,\xff,0.1\n"
    )
    with pytest.raises(ResumeError, match=r"c\.csv is damaged: expected the columns"):
        read_certificates(tmp_path / "c.csv")


def test_what_a_file_holds_is_written_beside_it(certifier, tmp_path):
    run(certifier, tmp_path / "c.csv", origin="digits 1234")
    mark = json.loads((tmp_path / "c.origin.json").read_text())
    content = (tmp_path / "c.csv").read_bytes()
    assert mark == {
        "fingerprint": certifier.bound.facts.fingerprint, "origin": "digits 1234", "rows": COUNT,
        "sha256": hashlib.sha256(content).hexdigest(),
    }  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "c.csv",
        "c.origin.json",
    ]
