"""What a run folder holds for its report: attacks, constants by method, images."""

import json

import pytest
import torch
from digits_run import CONFIG
from safetensors.torch import load_file

import lipcert
from lipcert import attacks, data
from lipcert.certificate.certificates import take
from lipcert.certificate.stream import read_certificates
from lipcert.errors import CertificateViolation, DataError
from lipcert.models import load_model
from lipcert.runs import evidence
from lipcert.training import resume


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize("part", ["", "standard"])
def test_attacks_agree_with_the_summary_and_with_the_certificates(finished, part):
    folder = finished / part
    summary, certificates = (
        summary_of(folder),
        read_certificates(folder / "certificates.csv"),
    )
    index, distance = evidence.read_attacks(folder / "attacks.csv")
    assert len(distance) == summary["attacked_inputs"] == CONFIG.attack_inputs
    assert set(index.diff().tolist()) == {
        len(certificates) // len(index),
        len(certificates) // len(index) + 1,
    }
    few = take(certificates, index)
    assert (distance >= few.radius).all()
    rows = [
        line.split(",") for line in (folder / "attacks.csv").read_text().splitlines()
    ]
    assert rows[0] == ["idx", "distance", "fooled at 0.25", "fooled at 0.5"]
    for column, entry in enumerate(summary["at"], start=2):
        fooled = torch.tensor([row[column] == "1" for row in rows[1:]])
        assert entry["attacked"] == (few.correct & ~fooled).double().mean()
        assert (
            few.certified_accuracy(entry["epsilon"])
            <= entry["attacked"]
            <= few.clean_accuracy
        )
    assert 0 < summary["at"][1]["attacked"] < summary["at"][0]["attacked"]


def test_the_number_of_attacked_inputs_does_not_change_the_weights(tmp_path):
    none = CONFIG.with_overrides(
        ["attack_inputs=0", "compare_standard=false", "epochs=1"]
    )
    other = none.with_overrides(["attack_inputs=7"])
    assert none.weights_digest() == other.weights_digest()
    result = lipcert.train(none, tmp_path)
    assert not (tmp_path / "attacks.csv").exists()
    assert result.summary.attacked_inputs == 0
    assert [entry.attacked for entry in result.summary.at] == [None, None]


def test_constants_are_guaranteed_by_both_methods(finished):
    constants = json.loads((finished / "constants.json").read_text())
    loaded = load_model(str(finished))
    assert list(constants["methods"]) == ["naive", "liplt"]
    for method, found in constants["methods"].items():
        expected = lipcert.bound(loaded.model, loaded.input_shape, method)
        assert found["mean"] == pytest.approx(expected.mean)
        assert sum(found["contributions"].values()) == pytest.approx(
            found["mean"], rel=1e-9
        )
        assert found["guarantee"] == "deterministic"
    assert constants["methods"]["liplt"]["mean"] < constants["methods"]["naive"]["mean"]
    assert constants["sites"] == {"input": "", "2": "ReLU"}


def test_the_gallery_shows_what_it_says(finished):
    summary, images = summary_of(finished), load_file(finished / "gallery.safetensors")
    certificates, test = (
        read_certificates(finished / "certificates.csv"),
        data.load("digits").test,
    )
    model, entries = load_model(str(finished)).model, summary["gallery"]
    groups = [entry["group"] for entry in entries]
    wrong = min(4, int((~certificates.correct).sum()))
    assert groups == ["most robust"] * 8 + ["least robust"] * 8 + ["wrong"] * wrong
    index = torch.tensor([entry["idx"] for entry in entries])
    assert len(set(index.tolist())) == len(index)
    assert torch.equal(images["images"], test.pixels(index))
    ordered = certificates.radius[certificates.correct].sort().values
    assert [entry["radius"] for entry in entries[:8]] == ordered.flip(0)[:8].tolist()
    assert [entry["radius"] for entry in entries[8:16]] == ordered[:8].tolist()
    for entry, image, other in zip(
        entries, images["images"], images["adversarial"], strict=True
    ):
        assert (entry["label"] == entry["prediction"]) == (entry["group"] != "wrong")
        assert (
            entry["adversarial_prediction"]
            == int(model(other[None]).argmax())
            != entry["prediction"]
        )
        assert entry["distance"] == pytest.approx(
            float((other.double() - image.double()).norm())
        )
        assert entry["distance"] >= entry["radius"]
        assert 0 <= other.min() <= other.max() <= 1


def test_fewer_correct_predictions_than_places_are_shown_once():
    label = torch.tensor([0] * 11 + [1] * 6)
    found = lipcert.Certificates(
        torch.zeros(17, dtype=torch.long), torch.ones(17), torch.arange(17.0), "", label
    )
    chosen = evidence._choose(found)
    assert chosen == [
        *((k, "most robust") for k in range(10, 2, -1)),
        *((k, "least robust") for k in range(3)),
        *((k, "wrong") for k in (16, 15, 14, 13)),
    ]


def test_attacks_are_repeatable_and_leave_the_random_state_alone(finished, tmp_path):
    test, certificates = (
        data.load("digits").test.take(slice(0, 30)),
        read_certificates(finished / "certificates.csv"),
    )
    part, model = (
        take(certificates, slice(0, 30)),
        load_model(str(finished)).model,
    )
    state = torch.get_rng_state()
    distances = [
        attacks.cross_check(model, test, part, [0.3], tmp_path) for _ in range(2)
    ]
    assert torch.equal(*distances)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.isfinite(distances[0]).any()


@pytest.mark.parametrize("attack", ["cross_check", "gallery"])
def test_a_success_inside_a_radius_is_an_error(finished, tmp_path, attack):
    test, certificates = (
        data.load("digits").test.take(slice(0, 20)),
        read_certificates(finished / "certificates.csv"),
    )
    part, model = (
        take(certificates, slice(0, 20)),
        load_model(str(finished)).model,
    )
    part.radius[3] = 10.0
    judge = {
        "cross_check": lambda: attacks.cross_check(model, test, part, [0.3], tmp_path),
        "gallery": lambda: evidence.write_gallery(model, test, part, tmp_path),
    }[attack]
    with pytest.raises(
        CertificateViolation, match="the certificate of input 3 does not hold"
    ):
        judge()
    assert (tmp_path / "violation.safetensors").exists()
    assert not (tmp_path / "gallery.safetensors").exists()


def test_a_run_that_is_stopped_while_it_attacks_is_finished_later(
    finished, run, monkeypatch
):
    """Nothing says that it is finished; what was there is used again."""
    expected = (finished / "attacks.csv").read_text()
    config = run / "config.toml"
    config.write_text(
        config.read_text().replace(
            "compare_standard = true", "compare_standard = false"
        )
    )
    (
        run / "checkpoint.safetensors"
    ).unlink()  # it belongs to the configuration with a twin
    for name in (
        "summary.json",
        "attacks.csv",
        "gallery.safetensors",
        "model.safetensors",
        "metrics.jsonl",
    ):
        (run / name).unlink()

    def stop(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(evidence, "cross_check", stop)
        with pytest.raises(KeyboardInterrupt):
            resume(run)
    assert not (run / "summary.json").exists()
    assert not (run / "attacks.csv").exists()
    with monkeypatch.context() as patch:
        patch.setattr(evidence, "bound_network", None)  # constants.json is kept
        resume(run)
    assert (run / "attacks.csv").read_text() == expected
    assert not list(run.glob(".*.tmp"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "idx,distance\n2,0.1\n1,0.3\n",
        "idx,distance\n0,nan\n",
        "idx\n0\n",
        "idx,distance\n0,near\n",
    ],
)
def test_damaged_attacks_are_refused(tmp_path, text):
    path = tmp_path / "attacks.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=r"attacks\.csv is damaged"):
        evidence.read_attacks(path)
