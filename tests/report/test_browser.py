"""The report in a real browser: no error, no request, the slider tells the truth, both themes, any width."""

import json
from pathlib import Path

import pytest

from lipcert.certificate.stream import read_certificates
from lipcert.runs import read_runs

pytestmark = pytest.mark.browser


@pytest.fixture
def opened(browser, page):
    """The page, freshly loaded, 1280 pixels wide."""
    resize(browser, 1280)
    browser.get(page.as_uri())
    return browser


def resize(browser, width):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def type_epsilon(browser, text):
    """What a user types into the number field."""
    browser.execute_script(
        "const field = document.getElementById('epsilon'); field.value = arguments[0];"
        "field.dispatchEvent(new Event('input', {bubbles: true}));", text,
    )  # fmt: skip


def shown(browser, kind, run=0):
    """(share, count) that a card shows."""
    share, count = (
        browser.execute_script(
            f"return document.querySelector('[data-run=\"{run}\"] .{kind} {tag}').textContent"
        )
        for tag in ("b", "small")
    )
    return share, int(count.split(" of ")[0].replace(",", ""))


def requests(browser):
    events = [
        json.loads(entry["message"])["message"]
        for entry in browser.get_log("performance")
    ]
    sent = [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
    return [address for address in sent if not address.startswith("data:")]


def test_no_errors_and_no_requests(browser, page):
    browser.get_log("performance")
    browser.get_log("browser")
    browser.get(page.as_uri())
    browser.execute_script("document.getElementById('theme').click()")
    type_epsilon(browser, "0.3")
    assert browser.get_log("browser") == []
    assert requests(browser) == [page.as_uri()]
    assert browser.title == "digits · certified robustness"


def test_a_request_and_an_error_would_be_seen(browser, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text("<img src='missing.png'><script>missing()</script>")
    browser.get_log("performance")
    browser.get(bad.as_uri())
    assert any(
        "missing is not defined" in entry["message"]
        for entry in browser.get_log("browser")
    )
    assert (tmp_path / "missing.png").as_uri() in requests(browser)


@pytest.mark.parametrize("part", ["", "standard"])
def test_the_number_field_reads_off_the_certificates(opened, finished, part):
    certificates = read_certificates(finished / part / "certificates.csv")
    run = read_runs([finished])[1 if part else 0]
    radii = certificates.radius[certificates.correct].sort().values
    exact = [float(radii[k]) for k in (5, len(radii) // 2, -1)]
    for epsilon in (
        0.0,
        0.1,
        0.25,
        0.5,
        2.0,
        *exact,
        *(value * (1 + 1e-15) for value in exact),
    ):
        type_epsilon(opened, repr(epsilon))
        count = int((radii >= epsilon).sum())
        assert shown(opened, "certified", int(bool(part))) == (
            f"{100 * count / len(certificates):.2f}\u202f%",
            count,
        )
        attacked = run.attacked_at(epsilon)
        assert (
            shown(opened, "attacked", int(bool(part)))[0]
            == f"{100 * attacked:.2f}\u202f%"
        )
    assert (
        radii == exact[1]
    ).any()  # radii in the file are those of the page, to the last bit


def test_the_slider_moves_marker_field_and_numbers(opened, finished):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    certificates = read_certificates(finished / "certificates.csv")
    handle = opened.find_element(By.ID, "epsilon-slider")
    before = float(opened.find_element(By.ID, "marker").get_attribute("x1"))
    handle.send_keys(Keys.PAGE_UP)
    epsilon = float(opened.find_element(By.ID, "epsilon").get_property("value"))
    assert epsilon > 0.25
    assert float(opened.find_element(By.ID, "marker").get_attribute("x1")) > before
    assert (
        shown(opened, "certified")[0]
        == f"{100 * certificates.certified_accuracy(epsilon):.2f}\u202f%"
    )
    handle.send_keys(Keys.HOME)
    assert shown(opened, "certified")[1] == int(certificates.correct.sum())


def test_dragging_on_the_chart_moves_the_slider(opened):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    chart = opened.find_element(By.ID, "chart")
    ActionChains(opened).move_to_element(chart).click().perform()
    middle = float(opened.find_element(By.ID, "epsilon").get_property("value"))
    end = float(opened.find_element(By.ID, "epsilon-slider").get_attribute("max"))
    assert middle == pytest.approx(end / 2, rel=0.05)


def test_nonsense_in_the_number_field_changes_nothing(opened):
    before = shown(opened, "certified")
    for text in ("", "-1", "abc"):
        type_epsilon(opened, text)
        assert shown(opened, "certified") == before


def test_the_theme_follows_the_system_and_the_button(opened):
    def background():
        return opened.execute_script(
            "return getComputedStyle(document.body).backgroundColor"
        )

    def prefer(scheme):
        features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        opened.execute_cdp_cmd("Emulation.setEmulatedMedia", features)

    prefer("light")
    light = background()
    opened.execute_script("document.getElementById('theme').click()")
    dark = background()
    assert sum(channels(dark)) < 150
    assert sum(channels(light)) > 600
    opened.refresh()
    prefer("dark")
    assert background() == dark
    opened.execute_script("document.getElementById('theme').click()")
    assert background() == light
    prefer("light")


def channels(colour):
    return [
        int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")
    ]


def test_a_table_that_is_wider_than_the_page_says_that_it_scrolls(opened):
    from selenium.webdriver.common.by import By

    for width in (400, 4000):
        resize(opened, width)
        opened.execute_script("document.querySelector('main').style.maxWidth = 'none'")
        opened.execute_script("window.dispatchEvent(new Event('resize'))")
        hint, box = (
            opened.find_element(By.CSS_SELECTOR, ".sideways"),
            opened.find_element(By.CSS_SELECTOR, ".scroll"),
        )
        assert hint.is_displayed() == (width == 400)
        assert (box.get_property("scrollWidth") > box.get_property("clientWidth")) == (
            width == 400
        )
    for cell in opened.find_elements(By.CSS_SELECTOR, ".numbers td"):
        assert "\n" not in cell.text
        assert " %" not in cell.text  # the space before the sign does not break


@pytest.mark.parametrize("width", [1280, 375])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_fits_any_width(opened, width, dark, tmp_path):
    resize(opened, width)
    if dark:
        opened.execute_script("document.getElementById('theme').click()")
    opened.execute_script(
        "document.querySelectorAll('details').forEach((block) => { block.open = true; })"
    )
    assert opened.execute_script("return document.documentElement.clientWidth") == width
    assert opened.execute_script("return document.documentElement.scrollWidth") <= width
    outside = opened.execute_script(
        "return [...document.querySelectorAll('svg, img, p, h1, h2, h3, dl, pre, input, .card, .pair')]"
        ".filter((e) => e.getBoundingClientRect().right > arguments[0] + 0.5).map((e) => e.outerHTML.slice(0, 80))",
        width,
    )
    assert outside == []
    picture = tmp_path / "page.png"
    assert opened.save_screenshot(str(picture))
    assert Path(picture).stat().st_size > 10_000
