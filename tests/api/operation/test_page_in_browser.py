"""The page at / in Debian's headless Chromium, against a real server."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.expected_conditions import alert_is_present
from selenium.webdriver.support.ui import Select, WebDriverWait

from tests.api.conftest import BASE, Checkpoints
from tests.support.http.server import Server, running_server, standing_still, wait_for
from tests.support.http.uploads import CONFIG, TENSORS, parts_of, upload
from tests.support.limits import LIMIT_SECONDS

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(
        not (CHROMIUM.exists() and DRIVER.exists()),
        reason="NOT RUN: the page was not looked at in a browser; install Debian's packages chromium and "
        "chromium-driver",
    ),
]


class Page:
    """The page in one tab."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        driver.get_log("browser")  # what another test has left
        driver.get(url)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        return self.driver.execute_script(
            "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)", selector
        )

    def until(self, condition: Callable[[], Any]) -> Any:
        return WebDriverWait(self.driver, LIMIT_SECONDS, poll_frequency=0.1).until(lambda _: condition())

    def fill(self, selector: str, text: str) -> None:
        self.find(selector).clear()
        self.find(selector).send_keys(text)

    def choose(self, models: list[str]) -> None:
        self.until(lambda: set(models) <= set(self.texts(".column:first-child option")))
        for column, model in zip(self.driver.find_elements(By.CSS_SELECTOR, ".model"), models, strict=False):
            Select(column).select_by_value(model)

    def chosen(self) -> list[str]:
        """The model of each column."""
        return self.driver.execute_script("return [...document.querySelectorAll('.model')].map((one) => one.value)")

    def faults(self) -> list[str]:
        """Errors of the console; what the content policy refused is among them."""
        return [line["message"] for line in self.driver.get_log("browser") if line["level"] == "SEVERE"]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    # Root may not use the sandbox, and containers have a small /dev/shm.
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking"):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    yield made
    made.quit()


@pytest.fixture
def page(driver: webdriver.Chrome, server: Server) -> Iterator[Page]:
    """The page of the server without keys; at the end nothing was wrong with it."""
    opened = Page(driver, f"{server.url}/")
    opened.until(lambda: "alpha" in opened.texts("#adapters th"))
    yield opened
    assert opened.faults() == []


@pytest.fixture
def uploaded(server: Server) -> Iterator[str]:
    """A name that is free before and after."""
    yield "from-page"
    server.http.delete(f"{server.url}/v1/adapters/from-page")


def test_two_columns_stream_side_by_side(page: Page, server: Server) -> None:
    page.choose([BASE, "alpha"])
    page.fill("#prompt", "the <b>cat</b>")
    page.fill("#max-tokens", "200")
    page.driver.execute_script("""
        window.pieces = {};
        new MutationObserver((changes) => changes.forEach(({ target }) => {
          const label = target.parentElement.getAttribute("aria-label");
          window.pieces[label] = (window.pieces[label] ?? 0) + 1;
        })).observe(document.getElementById("columns"), { characterData: true, subtree: true });
    """)
    page.find("#prompt").send_keys(Keys.CONTROL, Keys.ENTER)
    endings = page.until(
        lambda: (found := page.texts(".ending")) and all(text.startswith("Ended: ") for text in found) and found
    )
    body = {"messages": [{"role": "user", "content": "the <b>cat</b>"}], "max_tokens": 200, "temperature": 0}
    for column, model in enumerate((BASE, "alpha")):
        answer = server.post("/v1/chat/completions", json={"model": model, **body}).json()
        reason, num_tokens = answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]
        assert page.texts(".answer")[column] == answer["choices"][0]["message"]["content"]
        assert endings[column] == f"Ended: {reason}, {num_tokens} tokens."
        assert page.texts(".num-tokens")[column] == str(num_tokens)
        assert page.texts(".first-token")[column].endswith(" ms")
        assert page.driver.execute_script("return window.pieces")[f"Answer {column + 1}"] > 2


def test_stop_aborts_what_streams(page: Page, server: Server) -> None:
    aborted = server.metric("requests_total", outcome="abort")
    page.choose([BASE, "beta"])
    with standing_still(*server.engine_pids()):  # so that no answer ends before the button is pressed
        page.find("#send").click()
        page.until(lambda: page.texts(".ending") == ["Waiting …"] * 2)
        wait_for(lambda: server.metric("num_requests_open") == 2, "the server to have both requests")
        page.find("#stop").click()
        page.until(lambda: page.texts(".ending") == ["Stopped."] * 2)
    wait_for(lambda: server.metric("requests_total", outcome="abort") == aborted + 2, "the requests to be aborted")
    assert page.find("#send").is_enabled()


def test_columns_can_be_four_and_plain_text_is_a_completion(page: Page, server: Server) -> None:
    Select(page.find("#num-columns")).select_by_visible_text("4")
    Select(page.find("#kind")).select_by_value("text")
    page.choose([BASE, "alpha", "beta", "gamma"])
    page.fill("#prompt", "xyz")
    page.fill("#max-tokens", "5")
    page.find("#send").click()
    page.until(lambda: all(text.startswith("Ended: ") for text in page.texts(".ending")))
    body = {"prompt": "xyz", "max_tokens": 5, "temperature": 0}
    wanted = [
        server.post("/v1/completions", json={"model": model, **body}).json()["choices"][0]["text"]
        for model in (BASE, "alpha", "beta", "gamma")
    ]
    assert page.texts(".answer") == wanted


def test_an_adapter_is_uploaded_shown_and_deleted(
    page: Page, server: Server, checkpoints: Checkpoints, uploaded: str
) -> None:
    page.find("#files").send_keys(f"{checkpoints.spare / CONFIG}\n{checkpoints.spare / TENSORS}")
    page.find("#adapter-name").send_keys(uploaded)
    page.find("#upload").click()
    page.until(lambda: page.texts("#upload-status") == [f"{uploaded} is loaded and can be used now."])
    report = server.get(f"/v1/adapters/{uploaded}").json()
    lines = page.texts("#report tbody tr td:first-child")
    assert lines == [one["module"] for one in report["modules"]]
    assert page.texts("#report h3")[0].startswith(f"{uploaded}: {len(lines)} modules, rank {report['rank']}")
    page.until(lambda: uploaded in page.texts("#adapters th"))

    def row() -> str:
        return page.texts("#adapters tr")[page.texts("#adapters th").index(uploaded)]

    assert "not yet" in row()
    page.choose([BASE, uploaded])
    page.fill("#max-tokens", "2")
    page.find("#send").click()
    page.until(lambda: re.search(r"\w+ \d+, \d{4}, \d+:\d\d:\d\d", row()))
    assert uploaded in page.texts(".column:first-child option")
    page.find(f'[aria-label="Delete {uploaded}"]').click()
    page.driver.switch_to.alert.accept()
    page.until(lambda: uploaded not in page.texts("#adapters th"))
    assert server.get(f"/v1/adapters/{uploaded}").status_code == 404
    assert not page.find("#report").is_displayed()
    assert page.texts("#upload-status") == [""], "what was said of it goes with it"
    assert uploaded not in page.chosen()
    assert page.texts(".ending")[1] == page.texts(".answer")[1] == ""


def test_replacing_a_name_asks(page: Page, server: Server, checkpoints: Checkpoints, uploaded: str) -> None:
    first = upload(server, uploaded, checkpoints.spare).raise_for_status().json()["version"]
    other = checkpoints.adapters / "beta"
    page.find("#files").send_keys(f"{other / CONFIG}\n{other / TENSORS}")
    page.find("#adapter-name").send_keys(uploaded)
    for answer, version in (("dismiss", first), ("accept", first + 1)):
        page.find("#upload").click()
        WebDriverWait(page.driver, LIMIT_SECONDS).until(alert_is_present())
        alert = page.driver.switch_to.alert
        assert alert.text.startswith(f"{uploaded} is there, as version {first}. Replace it?")
        getattr(alert, answer)()
        if answer == "accept":
            page.until(lambda: page.texts("#upload-status") == [f"{uploaded} is loaded and can be used now."])
        assert server.get(f"/v1/adapters/{uploaded}").json()["version"] == version


def test_no_model_has_two_columns(page: Page, server: Server, checkpoints: Checkpoints, uploaded: str) -> None:
    Select(page.find("#num-columns")).select_by_visible_text("4")
    page.until(lambda: page.chosen() == [BASE, "alpha", "beta", "gamma"])
    page.fill("#max-tokens", "2")
    page.find("#send").click()
    page.until(lambda: all(text.startswith("Ended: ") for text in page.texts(".ending")))
    page.choose(["gamma"])
    assert page.chosen() == ["gamma", "alpha", "beta", BASE], "they change places"
    told = [bool(text) for text in page.texts(".ending")]
    assert told == [False, True, True, False], "an answer goes with its model"
    # One with a template of its own, as those for tools have, is no column's first model.
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    parts = parts_of(checkpoints.spare) | {"chat_template": template.encode()}
    answer = server.http.put(f"{server.url}/v1/adapters/{uploaded}", files=parts)
    assert answer.json()["has_chat_template"]
    server.http.put(f"{server.url}/v1/adapters/a{uploaded}", files=parts).raise_for_status()
    try:
        page.driver.refresh()
        page.until(lambda: page.chosen() == [BASE, "alpha"])
        assert f"a{uploaded}" in page.texts(".column:first-child option")
    finally:
        server.http.delete(f"{server.url}/v1/adapters/a{uploaded}")


def test_a_folder_can_be_dropped(page: Page, checkpoints: Checkpoints, uploaded: str) -> None:
    page.driver.execute_script("document.getElementById('drop').scrollIntoView({ block: 'center' })")
    area = page.driver.execute_script("return document.getElementById('drop').getBoundingClientRect().toJSON()")
    data = {"items": [], "files": [str(checkpoints.spare)], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        event = {"type": kind, "x": area["x"] + 9, "y": area["y"] + 9, "data": data}
        page.driver.execute_cdp_cmd("Input.dispatchDragEvent", event)
    page.until(lambda: TENSORS in page.texts("#upload-status")[0])
    to_upload, _, left_out = page.texts("#upload-status")[0].partition(" Left out: ")
    assert CONFIG in to_upload
    assert left_out == "README.md."  # PEFT writes one
    assert page.find("#adapter-name").get_property("value") == checkpoints.spare.name
    page.fill("#adapter-name", uploaded)
    page.find("#upload").click()
    page.until(lambda: uploaded in page.texts("#adapters th"))


def test_an_upload_that_does_not_fit_says_what(
    driver: webdriver.Chrome, server: Server, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    config = json.loads((checkpoints.spare / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps({**config, "peft_type": "<b>NOT</b>"}))
    page = Page(driver, f"{server.url}/")
    page.find("#files").send_keys(f"{tmp_path / CONFIG}\n{checkpoints.spare / TENSORS}")
    page.find("#adapter-name").send_keys("misfit")
    page.find("#upload").click()
    page.until(lambda: "error" in page.find("#upload-status").get_attribute("class"))
    assert "<b>NOT</b>" in page.texts("#upload-status")[0]
    (tmp_path / CONFIG).write_text(json.dumps({**config, "target_modules": ["q_proj"]}))
    page.find("#files").clear()
    page.find("#files").send_keys(f"{tmp_path / CONFIG}\n{checkpoints.spare / TENSORS}")
    page.find("#upload").click()
    page.until(lambda: page.texts("#report h3") == ["What does not fit"])
    assert any("w1" in line for line in page.texts("#report tbody tr"))
    assert all("400" in fault for fault in page.faults())


def test_plots_follow_the_metrics(page: Page, server: Server) -> None:
    def drawn() -> bool:
        server.post("/v1/completions", json={"model": "alpha", "prompt": "the", "max_tokens": 16})
        return all(now != "–" for now in page.texts("figure .now"))

    page.until(drawn)
    assert len(page.texts("figure")) == 5
    paths = [path.get_attribute("d") for path in page.driver.find_elements(By.CSS_SELECTOR, "figure path")]
    assert all(path.startswith("M") for path in paths)


def test_a_plot_shows_the_part_of_prompts_that_the_prefix_cache_has(page: Page, server: Server) -> None:
    """Before the second request with a prompt it has none of that prompt, then nearly all."""
    (number,) = [i for i, title in enumerate(page.texts("figure .title")) if title == "Prompts from the cache"]
    prompts = itertools.count()

    def shown(prompt: list[int]) -> float | None:
        body = {"model": BASE, "prompt": prompt, "max_tokens": 1}
        assert server.post("/v1/completions", json=body).status_code == 200
        found = re.fullmatch(r"([0-9.]+) %", page.texts("figure .now")[number])
        return float(found[1]) if found else None

    def new() -> list[int]:
        return [20 + one % 200 for one in range(next(prompts) % 150, 400)]

    page.until(lambda: shown(new()) == 0)
    same = [30] * 400
    page.until(lambda: 90 < (shown(same) or 0) < 100)


def test_an_answer_is_read_alike_however_it_is_cut(page: Page) -> None:
    text = 'data: {"a": "ä€😀"}\n\n: a comment\r\n\r\nevent: x\rdata:one\rdata: two\r\rdata: [DONE]\n\n'
    read = """
        const [bytes, cuts, done] = arguments;
        import("./static/sse.js").then(({ EventReader }) => done(cuts.map((ends) => {
          const reader = new EventReader();
          return ends.flatMap((end, i) => reader.push(new Uint8Array(bytes.slice(ends[i - 1] ?? 0, end))));
        })));
    """
    data = list(text.encode())
    cuts = [[*ends, len(data)] for ends in itertools.combinations(range(len(data)), 2)]
    cuts.append(list(range(1, len(data) + 1)))
    page.driver.set_script_timeout(LIMIT_SECONDS)
    answers = page.driver.execute_async_script(read, data, cuts)
    assert answers == [['{"a": "ä€😀"}', "one\ntwo", "[DONE]"]] * len(cuts)


def test_keys_are_asked_for_and_not_kept(driver: webdriver.Chrome, checkpoints: Checkpoints, tmp_path: Path) -> None:
    settings = {"preload_adapters_dir": checkpoints.adapters, "api_keys": "reader", "admin_api_keys": "admin"}
    with running_server(checkpoints.base, tmp_path, **settings) as server:
        page = Page(driver, f"{server.url}/")
        for key, refused in (("wrong", True), ("reader", False)):
            page.until(lambda: page.find("#key").is_displayed())
            page.find("#key").send_keys(key, Keys.ENTER)
            if refused:
                page.until(lambda: "not known" in page.find("#key-reason").text)
        page.until(lambda: "alpha" in page.texts("#adapters th"))
        assert not page.find("#key-dialog").is_displayed()
        page.find('[aria-label="Delete alpha"]').click()
        driver.switch_to.alert.accept()
        page.until(lambda: "the scope `delete` or `admin`" in page.texts("#adapters-status")[0])
        page.find("#change-key").click()
        page.find("#key").send_keys("admin", Keys.ENTER)
        page.find('[aria-label="Delete alpha"]').click()
        driver.switch_to.alert.accept()
        page.until(lambda: "alpha" not in page.texts("#adapters th"))
        kept = driver.execute_script("return [localStorage.length, sessionStorage.length, document.cookie]")
        assert kept == [0, 0, ""]
        assert all("401" in fault or "403" in fault for fault in page.faults())
        driver.refresh()
        page.until(lambda: page.find("#key").is_displayed())


@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_the_screen_and_every_control_has_a_name(page: Page, width: int) -> None:
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        assert page.driver.execute_script("return document.documentElement.scrollWidth") <= width
        controls = page.driver.find_elements(By.CSS_SELECTOR, "main :is(input, select, textarea, button)")
        shown = [one for one in controls if one.is_displayed()]
        assert shown
        assert [one.get_attribute("outerHTML") for one in shown if not one.accessible_name] == []
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
