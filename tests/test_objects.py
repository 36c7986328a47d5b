"""What bounds, certificates and runs show in terminals and notebooks: their own numbers, nothing else."""

from __future__ import annotations

import io
import re
import sys
from html import unescape
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import lipcert
from lipcert.errors import LipcertError, OptionError

Shown = lipcert.Bound | lipcert.Certificates | lipcert.Run


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(16, 12),
        nn.ReLU(),
        nn.Linear(12, 12),
        nn.ReLU(),
        nn.Linear(12, 3),
    ).eval()


@pytest.fixture(scope="module")
def bound(model: nn.Module) -> lipcert.Bound:
    return lipcert.bound(model, (1, 4, 4))


@pytest.fixture(scope="module")
def certificates(model: nn.Module, bound: lipcert.Bound) -> lipcert.Certificates:
    torch.manual_seed(2)
    return lipcert.certify(
        model, torch.rand(50, 1, 4, 4), bound, labels=torch.randint(3, (50,))
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> lipcert.Run:
    overrides = [
        "model=mlp-64",
        "epochs=2",
        "warmup_epochs=0",
        "schedule.decay_epoch=0",
        "eval_every=2",
    ]
    config = lipcert.TrainConfig.preset("digits").with_overrides(
        [*overrides, "attack_inputs=10"]
    )
    return lipcert.train(config, tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(params=["bound", "certificates", "run"])
def shown(request: pytest.FixtureRequest) -> Shown:
    return request.getfixturevalue(request.param)


def terminal_rows(thing: Shown) -> list[list[str]]:
    """The cells that rich prints, row by row."""
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(thing)
    lines = console.export_text().splitlines()
    return [
        [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]
        for line in lines
        if line[:1] in "│┃"
    ]


def html_rows(thing: Shown) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", thing._repr_html_())
    return [
        [unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]
        for row in rows
    ]


def test_terminal_and_notebook_show_the_same_table(shown):
    rows = terminal_rows(shown)
    assert len(rows) > 1
    assert rows == html_rows(shown)


def test_one_line_representation(shown):
    assert repr(shown).startswith(type(shown).__name__ + "(")
    assert "\n" not in repr(shown)


def test_html_has_no_colours_and_escapes_names(shown):
    html = shown._repr_html_()
    assert "color" not in html
    assert not re.search(r"#[0-9a-f]{3}", html)
    opened, closed = re.findall(r"<(\w+)", html), re.findall(r"</(\w+)", html)
    assert sorted(opened) == sorted(closed)


def test_html_escapes_what_is_not_markup():
    from lipcert.display import TextTable

    html = TextTable("a < b", ("name",), [("<script>",)], "c & d").html()
    assert "<script>" not in html
    assert "a &lt; b" in html
    assert "c &amp; d" in html


def test_table_of_a_bound(bound):
    rows = terminal_rows(bound)[1:]
    assert [row[0] for row in rows] == list(bound.contributions)
    assert [float(row[2]) for row in rows] == pytest.approx(
        list(bound.contributions.values()), rel=1e-5
    )
    assert [float(row[1]) for row in rows] == pytest.approx(
        [1.0, *bound.prefix.tolist()], rel=1e-5
    )
    assert sum(float(row[2]) for row in rows) == pytest.approx(bound.mean, rel=1e-4)
    assert f"{bound.mean:.6g}" in bound._repr_html_()


def test_table_of_certificates(certificates):
    rows = {row[0]: row[1:] for row in terminal_rows(certificates)[1:]}
    right = certificates.radius[certificates.correct]
    assert rows["correct"][0] == str(len(right))
    assert float(rows["correct"][1]) == pytest.approx(float(right.min()), rel=1e-3)
    assert float(rows["correct"][3]) == pytest.approx(float(right.median()), rel=1e-3)
    assert float(rows["all"][5]) == pytest.approx(
        float(certificates.radius.max()), rel=1e-3
    )
    assert int(rows["correct"][0]) + int(rows["wrong"][0]) == int(rows["all"][0]) == 50


def test_table_of_no_certificates(certificates):
    nothing = torch.zeros(0)
    empty = lipcert.Certificates(
        nothing.long(), nothing.double(), nothing.double(), "deterministic"
    )
    assert terminal_rows(empty)[1] == ["all", "0", *"–––––"]


def test_table_of_a_run(run):
    rows = terminal_rows(run)[1:]
    for row, part in zip(rows, (run, run.standard), strict=True):
        assert row[0] == part.summary.loss
        shares = [part.summary.clean]
        for entry in part.summary.at:
            shares += [entry.attacked, entry.certified]
        assert row[1:-1] == [f"{share:.2%}" for share in shares]


def test_pandas_of_a_bound(bound):
    frame = bound.to_pandas()
    assert frame["contribution"].to_dict() == bound.contributions
    assert frame["from_input"].tolist() == [1.0, *bound.prefix.tolist()]


def test_pandas_of_certificates(certificates):
    frame = certificates.to_pandas()
    assert frame["radius"].tolist() == certificates.radius.tolist()
    assert frame["correct"].mean() == certificates.clean_accuracy
    assert (
        (frame["radius"] >= 0.1) & frame["correct"]
    ).mean() == certificates.certified_accuracy(0.1)


def test_pandas_of_a_run(run):
    frame = run.to_pandas()
    assert frame.index.tolist() == [1, 2]
    assert frame["loss"].tolist() == [record["loss"] for record in run.metrics]
    assert frame["estimated_certified/0.25"].isna().tolist() == [True, False]


def test_without_pandas_the_error_has_the_remedy(shown, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(LipcertError, match="pip install pandas"):
        shown.to_pandas()


def test_plot_of_a_pairwise_bound_is_a_heat_map(bound):
    image = bound.plot(["a", "b", "c"]).axes[0].images[0]
    values = torch.tensor(image.get_array().filled(0.0))
    assert torch.equal(values, bound.value)
    with pytest.raises(OptionError, match="2 names"):
        bound.plot(["a", "b"])


def test_plot_of_another_bound_shows_contributions(model):
    bound = lipcert.bound(model, (1, 4, 4), target="network")
    widths = [bar.get_width() for bar in bound.plot().axes[0].patches]
    assert widths == list(bound.contributions.values())


def test_plot_of_certificates_is_their_accuracy(certificates):
    x, y = certificates.plot().axes[0].lines[0].get_data()
    assert y[0] == pytest.approx(100 * certificates.clean_accuracy)
    assert x[-1] == float(certificates.radius[certificates.correct].max())


def test_plot_of_certificates_without_a_right_prediction(certificates):
    wrong = (certificates.prediction + 1) % 3
    none = lipcert.Certificates(
        certificates.prediction, certificates.margin, certificates.radius, "", wrong
    )
    assert none.plot().axes[0].lines[0].get_ydata().tolist() == [0, 0]


def test_plot_without_labels_is_a_histogram(certificates):
    unlabelled = lipcert.Certificates(
        certificates.prediction, certificates.margin, certificates.radius, ""
    )
    figure = unlabelled.plot()
    assert sum(bar.get_height() for bar in figure.axes[0].patches) == pytest.approx(100)
    assert figure.axes[1].lines[0].get_ydata()[0] == 100


def test_plot_of_a_run(run):
    figure = run.plot()
    curves = {
        line.get_label(): line.get_ydata().tolist()
        for axes in figure.axes
        for line in axes.lines
    }
    assert curves["all"] == [record["loss"] for record in run.metrics]
    assert curves["liplt"] == [record["estimated_mean_liplt"] for record in run.metrics]
    share = run.metrics[-1]["estimated_certified"]["0.25"]
    assert curves["certified at 0.25 (estimate)"] == [100 * share]


def test_plots_can_be_saved(shown, tmp_path: Path):
    from lipcert.display import save_figure

    assert all(
        path.stat().st_size > 1000
        for path in save_figure(shown.plot(), tmp_path / "figure")
    )


def test_figure_of_the_readme(run, tmp_path: Path):
    from docs.figures import readme

    assert [path.name for path in readme(run.folder, tmp_path)] == [
        "digits.png",
        "digits.svg",
    ]
    text = (tmp_path / "digits.svg").read_text()
    assert "cross-entropy" in text
    assert "CRM" in text
