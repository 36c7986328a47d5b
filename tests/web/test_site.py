"""The classifier in a real browser: the radius that Python knows, and no request that leaves the page."""

import json
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import lipcert
from lipcert.cli import app
from lipcert.errors import DataError, OptionError
from lipcert.models import save_model, zoo
from lipcert.web import browser_runtime, write_site

NAMES = tuple("abcdefghij")
DROP = """
const dropped = new DataTransfer();
dropped.items.add(new File([new Uint8Array(arguments[1])], arguments[0]));
document.dispatchEvent(new DragEvent("drop", { dataTransfer: dropped }));
"""


@pytest.fixture(scope="module")
def classifier():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
    ).eval()
    return lipcert.CertifiedClassifier(model, lipcert.bound(model, (1, 8, 8)))


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def site(classifier, tmp_path):
    try:
        write_site(classifier, tmp_path / "site", "Letters", NAMES)
    except DataError as error:
        pytest.skip(str(error))
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Quiet, directory=tmp_path / "site")
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.mark.browser
def test_the_browser_has_the_radius_of_the_classifier(
    browser, site, classifier, tmp_path
):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    def shown(name):
        return browser.find_element(By.ID, name).text

    browser.get_log("performance")
    browser.get_log("browser")
    browser.get(site)
    WebDriverWait(browser, 60).until(lambda _: shown("status") not in ("",))
    assert shown("status") == "ready"
    generator = np.random.default_rng(3)
    for k in range(2):
        image = generator.integers(0, 256, (8, 8), np.uint8)
        path = tmp_path / f"image-{k}.png"
        Image.fromarray(image).save(path)
        if k == 0:
            browser.find_element(By.ID, "file").send_keys(str(path))
        else:
            browser.execute_script(DROP, path.name, list(path.read_bytes()))
        WebDriverWait(browser, 20).until(
            lambda _, name=path.name: shown("status") == name
        )
        x = torch.from_numpy(image / 255).float()[None, None]
        logits, radius = classifier(x)
        assert float(radius) > 0
        found = float(browser.find_element(By.ID, "radius").get_attribute("data-value"))
        assert found == pytest.approx(float(radius), rel=1e-4)
        prediction = int(logits.argmax())
        assert shown("class") == NAMES[prediction]
        ratios = (logits[0, prediction] - logits[0]) / classifier.constants[prediction]
        ratios[prediction] = torch.inf
        assert shown("nearest") == NAMES[int(ratios.argmin())]
    browser.execute_script(DROP, "notes.txt", [65, 66])
    WebDriverWait(browser, 20).until(
        lambda _: "notes.txt is not an image" in shown("status")
    )
    browser.execute_script("document.getElementById('clear').click()")
    ActionChains(browser).click(browser.find_element(By.ID, "picture")).perform()
    drawn = torch.tensor(
        browser.execute_script("return last.then(() => Array.from(pixels()))")
    )
    assert float(drawn.max()) > 0.5
    radius = float(classifier(drawn.reshape(1, 1, 8, 8))[1])
    assert float(
        browser.find_element(By.ID, "radius").get_attribute("data-value")
    ) == pytest.approx(radius, rel=1e-4)
    events = [
        json.loads(entry["message"])["message"]
        for entry in browser.get_log("performance")
    ]
    sent = [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in sent if not url.startswith((site, "data:", "blob:"))] == []
    assert [
        entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"
    ] == []


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = zoo.build("mlp-64", (1, 8, 8), 10, seed=0)
    save_model(model, tmp_path / "model.safetensors", "mlp-64", (1, 8, 8), 10)
    monkeypatch.setattr("lipcert.web.site.copy_runtime", lambda folder: None)
    run = CliRunner()
    command = [
        "export",
        "model.safetensors",
        "--onnx",
        "net.onnx",
        "--web",
        "site",
        "--quiet",
    ]
    result = run.invoke(app, command, catch_exceptions=False)
    assert "page: site/index.html" in result.stdout
    assert (tmp_path / "net.onnx").read_bytes() == (
        tmp_path / "site/classifier.onnx"
    ).read_bytes()
    assert json.loads((tmp_path / "site/classifier.json").read_text())[
        "classes"
    ] == list("0123456789")
    with pytest.raises(
        OptionError, match=r"nothing to write; give --onnx FILE, --web FOLDER or both"
    ):
        run.invoke(app, ["export", "model.safetensors"], catch_exceptions=False)


def test_what_is_no_page(classifier, tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(
        OptionError, match=r"exists and holds something else than such a page"
    ):
        write_site(classifier, tmp_path, "Letters")
    model = nn.Linear(3, 2).eval()
    flat = lipcert.CertifiedClassifier(model, lipcert.bound(model, (3,)))
    with pytest.raises(
        OptionError,
        match=r"images of 1 or 3 channels, the model takes inputs of shape \(3,\)",
    ):
        write_site(flat, tmp_path / "flat", "flat")
    monkeypatch.setenv("LIPCERT_CACHE", str(tmp_path / "cache"))
    remote = browser_runtime.Remote("none.tgz", "0" * 64, ("file:///nowhere/none.tgz",))
    monkeypatch.setattr(browser_runtime, "_PACKAGE", remote)
    with pytest.raises(
        DataError,
        match=r"the page needs onnxruntime-web: .*; put none.tgz from npm into .*cache/npm",
    ):
        write_site(classifier, tmp_path / "offline", "Letters")
    assert not (tmp_path / "offline").exists()
