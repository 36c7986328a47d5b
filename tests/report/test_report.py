"""The page, its figures and its tables: what they say, what they leave out, what they refuse."""

import json
import re
import shutil

import pytest
from html5 import parse
from typer.testing import CliRunner

from lipcert.certificate.stream import read_certificates
from lipcert.cli import app
from lipcert.display import TextTable
from lipcert.errors import DataError, OptionError
from lipcert.report import compare, write_report
from lipcert.report.side_by_side import duration
from lipcert.runs import read_runs

SECTIONS = [
    "runs",
    "accuracy",
    "radii",
    "contributions",
    "pairwise",
    "training",
    "gallery",
    "repeat",
]


def invoke(*arguments):
    result = CliRunner().invoke(
        app,
        [str(part) for part in arguments],
        catch_exceptions=False,
        env={"COLUMNS": "200"},
    )
    assert result.exit_code == 0
    return result.output


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_page_says_what_the_folder_holds(page, finished):
    document = parse(page)
    certificates = read_certificates(finished / "certificates.csv")
    summary = json.loads((finished / "summary.json").read_text())
    assert [section for section in document.ids if section in SECTIONS] == SECTIONS
    lead = document.text_of("header")
    median = float(certificates.radius.median())
    for share in (
        certificates.clean_accuracy,
        certificates.certified_accuracy(0.25),
        summary["at"][0]["attacked"],
    ):
        assert f"{100 * share:.1f}\u202f%" in lead
    assert f"{median:.3g} or more" in lead
    assert "The same network trained for accuracy only, digits (standard)" in lead
    repeat = document.text_of("repeat")
    environment = json.loads((finished / "environment.json").read_text())
    for fact in (environment["data"]["checksum"], environment["processor"], f"torch {environment['versions']['torch']}",
                 "deterministic", "l2, pixels in [0, 1]", "attack_inputs = 80", summary["fingerprint"]):  # fmt: skip
        assert fact in repeat
    assert len(document.images) == 2 * (
        len(summary["gallery"]) + len(twin_summary(finished)["gallery"])
    )
    assert "left out" not in document.text


def twin_summary(folder):
    return json.loads((folder / "standard" / "summary.json").read_text())


def test_the_page_needs_nothing_else(page):
    document = parse(page)
    assert all(image.startswith("data:image/png;base64,") for image in document.images)
    assert document.duplicate_ids == []
    for address in document.addresses:
        assert address.startswith(("data:", "#", "figures/"))
    for picture in (
        address for address in document.addresses if address.startswith("figures/")
    ):
        assert (page.parent / picture).stat().st_size > 1000
    text = page.read_text("utf-8")
    assert not re.search(r"@import|<script[^>]+src=|url\((?!#)", text)


def test_figures_are_written_as_png_and_svg(page):
    names = {path.stem for path in (page.parent / "figures").iterdir()}
    kinds = ("radii", "contributions", "pairwise", "constants", "losses", "accuracies")
    assert names == {
        "accuracy",
        *(f"{kind}-digits{twin}" for kind in kinds for twin in ("", "-standard")),
    }
    for name in names:
        assert (
            (page.parent / "figures" / f"{name}.png")
            .read_bytes()
            .startswith(b"\x89PNG")
        )
        assert "<svg" in (page.parent / "figures" / f"{name}.svg").read_text()


def test_one_run_is_written_into_its_folder(run):
    page = write_report([run])
    assert page == run / "report.html"
    document = parse(page)
    assert "open: neither proved nor broken" in document.text_of("accuracy")
    assert "standard" not in document.text_of("runs")
    assert not list(run.glob(".*.tmp"))


def test_several_runs_stand_side_by_side(finished, run, tmp_path, undrawn):
    share = read_certificates(run / "certificates.csv").certified_accuracy(0.4)
    edit(
        run / "summary.json",
        name="other",
        at=[{"epsilon": 0.4, "certified": share, "attacked": None}],
    )
    runs = read_runs([run, finished])
    assert [r.name for r in runs] == ["other", "digits", "digits (standard)"]
    table = compare(runs)
    assert [c for c in table.columns if "certified" in c] == [
        f"certified at ε = {eps}" for eps in (0.25, 0.4, 0.5)
    ]
    certificates = read_certificates(run / "certificates.csv")
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (
        row["certified at ε = 0.4"]
        == f"{100 * certificates.certified_accuracy(0.4):.2f}\u202f%"
    )
    page = write_report([run, finished], tmp_path / "out")
    document = parse(page)
    assert page == tmp_path / "out" / "report.html"
    assert document.text_of("radii").count("PNG") == 3
    assert "other is right on" not in document.text_of("header")
    assert "digits is right on" in document.text_of("header")
    assert not (run / "report.html").exists()


def test_the_table_says_how_many_inputs_were_attacked(finished, run):
    table = compare(read_runs([finished]))
    assert [row[table.columns.index("inputs attacked")] for row in table.rows] == [
        "80 of 359",
        "80 of 359",
    ]
    for row in table.rows:
        cell = row[table.columns.index("attacked at ε = 0.25")]
        certified, attacked, clean = (
            float(part.rstrip("%\u202f ")) for part in cell.split("≤")
        )
        assert certified <= attacked <= clean
    (run / "attacks.csv").unlink()
    assert not any("attacked" in column for column in compare(read_runs([run])).columns)


def test_equal_names_are_told_apart_and_equal_folders_refused(finished, run):
    names = [r.name for r in read_runs([run, finished])]
    assert names == [f"digits ({run})", f"digits ({finished})", "digits (standard)"]
    with pytest.raises(DataError, match="a run is given twice"):
        read_runs([run, run])


MISSING = {
    "attacks.csv": (
        "accuracy",
        "Accuracy under attack is left out for digits: there is no attacks.csv.",
    ),
    "constants.json": (
        "contributions",
        "The naive method is left out for digits: there is no constants.json.",
    ),
    "bound.json": (
        "pairwise",
        "The constants are left out for digits: there is no bound.json.",
    ),
    "metrics.jsonl": (
        "training",
        "The training is left out for digits: there is no metrics.jsonl.",
    ),
    "gallery.safetensors": (
        "gallery",
        "The images are left out for digits: there is no gallery.safetensors.",
    ),
    "environment.json": (
        "repeat",
        "The environment is left out for digits: there is no environment.json.",
    ),
}


@pytest.mark.parametrize("file", MISSING)
def test_what_is_missing_is_left_out_with_the_reason(run, file, undrawn):
    (run / file).unlink()
    section, reason = MISSING[file]
    document = parse(write_report([run]))
    assert reason in document.text_of(section)
    assert document.text.count("left out") == 1
    if section in ("pairwise", "training", "gallery"):
        assert "PNG" not in document.text_of(section)
        assert (
            document.text_of(section).count(".") == 2
        )  # nothing but the reason, which names a file


@pytest.mark.parametrize("file", [*MISSING, "bound.safetensors"])
def test_what_is_damaged_is_left_out_with_the_reason(run, file, undrawn):
    (run / file).write_bytes((run / file).read_bytes()[:40] + b"\x00\xff\n")
    section = MISSING.get(file, MISSING["bound.json"])[0]
    text = parse(write_report([run])).text_of(section)
    assert re.search(rf"left out for digits: .*{file.split('.')[0]}.* is damaged", text)


def test_numbers_of_other_weights_are_left_out(run, finished, undrawn):
    for name in ("bound.json", "bound.safetensors", "constants.json"):
        shutil.copy(finished / "standard" / name, run / name)
    document = parse(write_report([run]))
    for section in ("contributions", "pairwise"):
        assert "belongs to other weights than the certificates" in document.text_of(
            section
        )
        assert "PNG" not in document.text_of(section)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("summary.json", "{", r"summary\.json is damaged"),
        ("summary.json", "[]", r"summary\.json is damaged"),
        ("summary.json", '{"at": []}', r"summary\.json is damaged"),
        (
            "summary.json",
            None,
            r"holds no finished run: summary.json is missing; finish it with .*--resume",
        ),
        ("certificates.csv", None, r"certificates\.csv cannot be read"),
        (
            "certificates.csv",
            "idx,label\n0,1\n",
            r"certificates\.csv cannot be read .*damaged",
        ),
        (
            "certificates.csv",
            "idx,label,prediction,margin,radius\n",
            r"certificates\.csv holds no certificates",
        ),
    ],
)
def test_a_folder_without_its_certificates_is_refused(
    run, file, text, message, undrawn
):
    if text is None:
        (run / file).unlink()
    else:
        (run / file).write_text(text)
        (
            run / "certificates.origin.json"
        ).unlink()  # without it, the rows alone are judged
    with pytest.raises(DataError, match=message):
        write_report([run])
    assert not (run / "report.html").exists()
    assert not (run / "figures").exists()


def test_edited_certificates_are_refused(run, undrawn):
    header, first, *others = (
        (run / "certificates.csv").read_text().splitlines(keepends=True)
    )
    (run / "certificates.csv").write_text(
        header + first.rsplit(",", 1)[0] + ",9.0\n" + "".join(others)
    )
    with pytest.raises(
        DataError,
        match=r"certificates\.csv cannot be read .*was edited or is damaged: .* certify the mod",
    ):
        write_report([run])


@pytest.mark.parametrize(
    "changed",
    [
        {"clean": 1.0},
        {"at": [{"epsilon": 0.5, "certified": 0.99}]},
        {"execution": "float16"},
        {"data": "imagenet"},
    ],
)
def test_a_summary_of_other_certificates_is_refused(run, changed, undrawn):
    edit(run / "summary.json", **changed)
    with pytest.raises(DataError, match="the summary is not about the certificates"):
        write_report([run])


def test_other_weights_in_the_folder_are_refused(run, finished, undrawn):
    shutil.copy(finished / "standard" / "model.safetensors", run)
    with pytest.raises(DataError, match="not the file whose certificates"):
        write_report([run])
    (run / "model.safetensors").unlink()  # results alone may be passed on
    write_report([run])


def _other_example(run):
    entries = json.loads((run / "summary.json").read_text())["gallery"]
    return {"gallery": [{**entries[0], "radius": 9.0}, *entries[1:]]}


def _other_distance(run):
    entries = json.loads((run / "summary.json").read_text())["gallery"]
    return {"gallery": [{**entries[0], "distance": 9.0}, *entries[1:]]}


@pytest.mark.parametrize("changed", [_other_example, _other_distance])
def test_examples_that_the_files_do_not_have_are_left_out(run, changed, undrawn):
    assert read_runs([run])[0].gallery
    edit(run / "summary.json", **changed(run))
    read = read_runs([run])[0]
    assert not read.gallery
    assert "says something else about input" in read.missing["gallery"]


@pytest.mark.parametrize("name", ["naive", "liplt", "best"])
def test_constants_that_do_not_add_up_are_left_out(run, name, undrawn):
    methods = json.loads((run / "constants.json").read_text())["methods"]
    kept = methods.get(name, methods["naive"])
    edit(run / "constants.json", methods={**methods, name: {**kept, "mean": 0.01}})
    assert read_runs([run])[0].constants is None


def test_certificates_without_their_origin_are_refused(run, undrawn):
    (run / "certificates.origin.json").unlink()
    with pytest.raises(DataError, match="the summary is not about the certificates"):
        write_report([run])


@pytest.mark.parametrize(
    "changed",
    [{"guarantee": "holds for ever"}, {"mean_constant": 0.01}, {"method": "best"}],
)
def test_what_the_bound_does_not_say_is_refused(run, changed, undrawn):
    edit(run / "summary.json", **changed)
    with pytest.raises(DataError, match=r"the summary says .*, its bound"):
        write_report([run])


def test_local_shares_without_local_certificates_are_refused(run, undrawn):
    share = read_certificates(run / "certificates.csv").certified_accuracy(0.5)
    at = [{"epsilon": 0.5, "certified": share, "local": 1.0}]
    edit(run / "summary.json", at=at, local_norm="l2")
    with pytest.raises(DataError, match=r"local\.csv cannot be read"):
        write_report([run])


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(
        DataError,
        match=r"holds no finished run: summary\.json is missing; give a run folder",
    ):
        write_report([tmp_path / "nothing"])


def test_names_from_the_outside_cannot_become_markup(run, undrawn):
    names = ["<script>alert(1)</script>", *(f'"{k}&' for k in range(9))]
    edit(
        run / "summary.json",
        name="<b>bold</b>",
        class_names=names,
        note="</script><script>alert(2)</script>",
    )
    page = write_report([run])
    assert "<script>alert" not in page.read_text("utf-8")
    assert "<b>bold" not in page.read_text("utf-8")
    assert "<b>bold</b>" in parse(page).text_of("header")


def test_tables():
    table = TextTable(
        "", ["run", "at ε = 0.5"], [["a_b|c", "50\u202f%"], ["d & e", "–"]], words=1
    )
    assert table.markdown() == (
        "| run | at ε = 0.5 |\n| :--- | ---: |\n| a_b\\|c | 50\u202f% |\n| d & e | – |\n"
    )  # fmt: skip
    assert table.latex().splitlines() == [
        r"\begin{tabular}{lr}", r"\toprule", r"run & at $\varepsilon$ = 0.5 \\", r"\midrule", r"a\_b|c & 50\,\% \\",
        r"d \& e & -- \\", r"\bottomrule", r"\end{tabular}",
    ]  # fmt: skip
    assert [duration(s) for s in (3.14159, 600, 9000)] == [
        "3.14\u202fs",
        "10\u202fmin",
        "2.5\u202fh",
    ]


def test_the_command_writes_the_page_and_prints_the_table(finished, tmp_path, undrawn):
    assert f"report: {tmp_path / 'report.html'}" in invoke(
        "report", finished, "--out", tmp_path
    )
    for kind, file in (("markdown", "table.md"), ("latex", "table.tex")):
        printed = invoke("report", finished, "--out", tmp_path, "--table", kind)
        assert (
            printed
            == (tmp_path / file).read_text("utf-8")
            == getattr(compare(read_runs([finished])), kind)()
        )
    with pytest.raises(
        OptionError, match="--table is 'html', expected one of markdown, latex"
    ):
        invoke("report", finished, "--table", "html")


def test_train_ends_with_a_report(finished, run, undrawn):
    shutil.copytree(finished / "standard", run / "standard")
    assert f"report: {run / 'report.html'}" in invoke("train", "--resume", run)
    assert "digits (standard)" in parse(run / "report.html").text_of("header")


def test_certify_ends_with_a_report(finished, tmp_path, undrawn):
    arguments = (
        "certify",
        finished / "model.safetensors",
        "--data",
        "digits",
        "--eps",
        0.2,
        "--out",
        tmp_path,
    )
    assert f"report: {tmp_path / 'report.html'}" in invoke(
        *arguments, "--limit", 30, "--quiet"
    )
    document = parse(tmp_path / "report.html")
    assert document.text.count("left out") == 2
    assert "Accuracy under attack is left out" in document.text_of("accuracy")
    assert document.text_of("training").startswith("Training The training is left out")
    assert "run/model.safetensors" in document.text_of("runs")
    assert "scikit-learn's digits" in document.text_of("repeat")
    assert len(document.images) > 20
    invoke(*arguments, "--limit", 30, "--quiet", "--attack")
    assert parse(tmp_path / "report.html").text.count("left out") == 1
