"""The viewer in real browsers, from its file alone: slices, labels, keys, no request."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from medseg.geometry.grid import VoxelGrid
from medseg.io.label_table import Structure
from medseg.report.viewer import ViewerWords, pack_volumes, write_viewer

TABLE = [Structure("left_lung", 1, "#38bdf8"), Structure("right_lung", 2, "#fb923c")]
GRID = VoxelGrid((60, 70, 80), (2.0, 2.0, 2.0), (-80.0, -70.0, 0.0))
BLUE, ORANGE, MAGENTA = (56, 189, 248), (251, 146, 60), (255, 47, 208)


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A body with a label on each side; the reference has more of the right in upper slices."""
    image, labels = np.full(GRID.shape, -1000, np.int16), np.zeros(GRID.shape, np.uint8)
    image[:, 5:65, 5:75] = 40
    labels[10:50, 20:50, 45:70], labels[10:50, 20:50, 10:35] = 1, 2
    image[labels > 0] = -850
    reference = labels.copy()
    reference[40:56, 10:60, 6:35] = 2
    words = ViewerWords(
        "Doe, John (ü)",
        "warnings",
        ["look at it"],
        ["a topogram was left out"],
        ["ml", "mean HU"],
        {1: ["12", "-850"], 2: ["13", "-851"]},
        {"left_lung": 0.98, "right_lung": 0.71},
        0.85,
        "Dice at least 0.93 (left lung) in 9 of 10 patients (26 patients)",
        {"most differences": GRID.index_to_world_xyz_mm([48, 35, 8]).tolist()},
        identity="patient P 7, 2023-02-03",
    )
    path = tmp_path_factory.mktemp("a viewer (1)") / "case ü.html"
    write_viewer(path, pack_volumes(image, labels, GRID, reference), words, TABLE, (-1000.0, 400.0))
    return path


@pytest.fixture(scope="module")
def viewer(chromium: Any, page_path: Path) -> Any:
    """The page in Chromium, ready; the logs have its messages alone."""
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    for log in ("browser", "performance"):
        chromium.get_log(log)
    chromium.get(page_path.as_uri())
    wait_for(lambda: chromium.execute_script("return document.body.dataset.ready"))
    return chromium


def wait_for(is_done: Callable[[], Any], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not is_done():
        assert time.monotonic() < end, "the viewer did not get ready"
        time.sleep(0.2)


def shown(driver: Any) -> np.ndarray:
    """Pixels of the part of the page with the slices, (rows, columns, 3)."""
    time.sleep(0.5)
    box = driver.execute_script(
        "const b = document.getElementById('canvas').getBoundingClientRect(); return [b.x, "
        "b.y, b.right, b.bottom]"
    )
    picture = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    return np.asarray(picture.crop(tuple(map(round, box)))).astype(int)


def lean(picture: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    """Pixels (rows, columns) whose hue is that of a colour."""
    hue = picture - picture.mean(axis=-1, keepdims=True)
    wanted = np.array(colour) - np.mean(colour)
    strength = np.linalg.norm(hue, axis=-1)
    return np.asarray((strength > 25) & (hue @ (wanted / np.linalg.norm(wanted)) > 0.9 * strength))


def press(driver: Any, key: str) -> None:
    driver.execute_script(
        "window.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0], bubbles: true}))",
        key,
    )


@pytest.mark.slow
def test_each_plane_shows_the_labels_on_their_side(viewer: Any) -> None:
    for key in ("a", "c"):
        press(viewer, key)
        picture = shown(viewer)
        blue, orange = lean(picture, BLUE), lean(picture, ORANGE)
        assert blue.sum() > 1000
        assert orange.sum() > 1000
        assert np.nonzero(blue)[1].mean() > np.nonzero(orange)[1].mean(), (
            "the patient's left is on the right"
        )
        assert (picture.max(axis=-1) > 60).mean() > 0.05, "the body is seen"
    press(viewer, "m")
    assert lean(shown(viewer), BLUE).sum() > 500


def canvas_box(driver: Any) -> dict[str, float]:
    """Left, top, width and height of the slices in the window."""
    box: dict[str, float] = driver.execute_script(
        "const box = document.getElementById('canvas').getBoundingClientRect();"
        "return {left: box.left, top: box.top, width: box.width, height: box.height}"
    )
    return box


def click(driver: Any, across: float, down: float) -> str:
    """Click at shares of the width and height of the slices; returns what is said below them."""
    box = canvas_box(driver)
    event = {
        "x": box["left"] + across * box["width"],
        "y": box["top"] + down * box["height"],
        "button": "left",
        "clickCount": 1,
    }
    for kind in ("mousePressed", "mouseReleased"):
        driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": kind, **event})
    time.sleep(0.5)
    return str(driver.execute_script("return document.getElementById('place').textContent"))


@pytest.mark.slow
def test_an_outline_is_a_thin_line_at_the_border_of_the_label(viewer: Any) -> None:
    press(viewer, "a")
    press(viewer, "j")
    press(viewer, "ArrowDown")
    blue = lean(shown(viewer), BLUE)
    rows = np.nonzero(blue.any(axis=1))[0]
    columns = np.nonzero(blue.any(axis=0))[0]
    # The label is 50 mm wide and 60 mm high.
    width_px, height_px = np.ptp(columns) + 1, np.ptp(rows) + 1
    assert abs(width_px / height_px - 50 / 60) < 0.05
    middle = blue[rows[0] + height_px // 2]
    crossings = np.split(
        np.nonzero(middle)[0], np.nonzero(np.diff(np.nonzero(middle)[0]) > 1)[0] + 1
    )
    assert len(crossings) == 2, "two lines and nothing between them"
    # A voxel of 2 mm is wider than that.
    assert all(len(crossing) <= 3 < 2 * width_px / 50 for crossing in crossings)


@pytest.mark.slow
def test_a_click_says_hu_label_and_position(viewer: Any) -> None:
    press(viewer, "a")
    press(viewer, "j")
    press(viewer, "m")
    press(viewer, "ArrowDown")
    text = click(viewer, 0.25, 0.25)
    assert "HU · " in text
    assert text.endswith(" mm (LPS)")
    middle_x_mm = float(text.split(" · ")[-1].split(",")[0].replace("−", "-"))
    assert abs(middle_x_mm) < 3, "the middle of the axial slice is that of the scan"
    # 57 mm to the patient's left of the middle is the left label, of air.
    tile_px = viewer.execute_script("return window.medsegViewer.screenSlices[0].leftTopWidthHeight")
    ratio = viewer.execute_script("return window.devicePixelRatio")
    px_per_mm = abs(tile_px[2]) / 160 / ratio
    text = click(viewer, 0.25 + 34 * px_per_mm / canvas_box(viewer)["width"], 0.25)
    value, label, place = text.split(" · ")
    assert label == "left lung"
    assert abs(float(value.split()[0].replace("−", "-")) + 850) <= 8
    assert abs(float(place.split(",")[0].replace("−", "-")) - 34) < 3


@pytest.mark.slow
def test_the_fourth_quadrant_shows_the_labels_from_the_front(viewer: Any) -> None:
    press(viewer, "m")
    picture = shown(viewer)
    quadrant = picture[picture.shape[0] // 2 :, picture.shape[1] // 2 :]
    blue, orange = lean(quadrant, BLUE), lean(quadrant, ORANGE)
    assert min(blue.sum(), orange.sum()) > 1000
    assert np.nonzero(blue)[1].mean() > np.nonzero(orange)[1].mean()
    row, column = (axis.mean() for axis in np.nonzero(orange))
    across, down = 0.5 + column / picture.shape[1], 0.5 + row / picture.shape[0]
    assert "right lung" in click(viewer, across, down), "a click leads to the surface"


@pytest.mark.slow
def test_patient_and_date_stand_below_the_name(viewer: Any) -> None:
    text = viewer.execute_script("return document.querySelector('aside').innerText")
    assert text.splitlines()[:3] == ["Doe, John (ü)", "", "patient P 7, 2023-02-03"]


@pytest.mark.slow
def test_keys_change_what_is_shown(viewer: Any) -> None:
    press(viewer, "a")
    press(viewer, "j")
    assert "missed" in viewer.execute_script("return document.getElementById('place').textContent")
    picture = shown(viewer)
    assert lean(picture, MAGENTA).sum() > 500
    press(viewer, "d")
    assert lean(shown(viewer), MAGENTA).sum() < 50
    press(viewer, "d")
    before = viewer.execute_script("return document.getElementById('place').textContent")
    press(viewer, "ArrowUp")
    assert viewer.execute_script("return document.getElementById('place').textContent") != before
    assert lean(shown(viewer), BLUE).sum() > 500
    press(viewer, "h")
    assert lean(shown(viewer), BLUE).sum() == 0
    for _ in range(4):
        press(viewer, "+")
    filled = lean(shown(viewer), BLUE).sum()
    for _ in range(4):
        press(viewer, "-")
    assert filled > 2 * lean(shown(viewer), BLUE).sum(), "a fill besides the outlines"
    bright = shown(viewer).mean()
    press(viewer, "w")
    assert abs(shown(viewer).mean() - bright) > 1, "another window"


@pytest.mark.slow
def test_nothing_is_requested_and_nothing_is_logged(viewer: Any) -> None:
    messages = [json.loads(entry["message"])["message"] for entry in viewer.get_log("performance")]
    urls = [
        one["params"]["request"]["url"]
        for one in messages
        if one["method"] == "Network.requestWillBeSent"
    ]
    assert len([url for url in urls if url.startswith("file:")]) == 1
    # chrome: the browser's own start page, which is part of the program.
    assert [url for url in urls if not url.startswith(("file:", "data:", "blob:", "chrome:"))] == []
    assert [entry for entry in viewer.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_narrow_and_wide(viewer: Any, width: int) -> None:
    metrics = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600}
    viewer.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    assert viewer.execute_script("return document.documentElement.scrollWidth") <= width
    assert (
        viewer.execute_script(
            "return document.getElementById('canvas').getBoundingClientRect().height"
        )
        > 300
    )
    viewer.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


class Marionette:
    """The least of Firefox's remote protocol: numbered JSON commands with length, by socket."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 60)
        self.file = self.socket.makefile("rb")
        self.read()

    def read(self) -> Any:
        length = b""
        while not length.endswith(b":"):
            byte = self.file.read(1)
            assert byte, "Firefox closed the connection"
            length += byte
        return json.loads(self.file.read(int(length[:-1])))

    def call(self, command: str, **parameters: Any) -> Any:
        text = json.dumps([0, 1, command, parameters])
        self.socket.sendall(f"{len(text.encode())}:{text}".encode())
        _, _, error, result = self.read()
        assert error is None, error
        return result.get("value") if isinstance(result, dict) else result

    def run(self, script: str) -> Any:
        return self.call("WebDriver:ExecuteScript", script=script, args=[])

    def press(self, key: str) -> None:
        self.run(
            f"window.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}', bubbles: true}}))"
        )

    def picture(self) -> np.ndarray:
        """Pixels of the part of the page with the slices, (rows, columns, 3)."""
        time.sleep(2)
        box = self.run(
            "const b = document.getElementById('canvas').getBoundingClientRect(); return [b.x, "
            "b.y, b.right, b.bottom]"
        )
        data = base64.b64decode(self.call("WebDriver:TakeScreenshot", full=False))
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        return np.asarray(picture.crop(tuple(map(round, box)))).astype(int)


@pytest.mark.slow
def test_firefox_shows_it_too(page_path: Path, tmp_path: Path) -> None:
    program = next(filter(None, map(shutil.which, ("firefox-esr", "firefox"))), None)
    # Firefox makes a WebGL context only where it finds a display, even if it shows nothing there.
    if program is None or shutil.which("Xvfb") is None:
        pytest.skip("no Firefox or no Xvfb here (Debian: firefox-esr, xvfb)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    preferences = {
        "marionette.port": port,
        "webgl.force-enabled": True,
        "webgl.forbid-software": False,
        "network.proxy.type": 1,
        "network.proxy.http": "127.0.0.1",
        "network.proxy.http_port": 9,
        "network.proxy.ssl": "127.0.0.1",
        "network.proxy.ssl_port": 9,
    }
    profile = tmp_path / "profile"
    profile.mkdir()
    (profile / "user.js").write_text(
        "".join(
            f"user_pref({json.dumps(key)}, {json.dumps(value)});\n"
            for key, value in preferences.items()
        )
    )
    command = [
        program,
        "--headless",
        "--marionette",
        "--no-remote",
        "--profile",
        str(profile),
        "--window-size=1280,900",
    ]
    silent: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    reader, writer = os.pipe()
    display = subprocess.Popen(
        ["Xvfb", "-displayfd", str(writer), "-screen", "0", "1280x900x24"],
        pass_fds=[writer],
        **silent,
    )
    os.close(writer)
    with display, os.fdopen(reader) as number:
        environment = {**os.environ, "DISPLAY": f":{number.readline().strip()}"}
        process = subprocess.Popen(command, env=environment, **silent)
        try:
            driver = None
            end = time.monotonic() + 120
            while driver is None:
                try:
                    driver = Marionette(port)
                except OSError:
                    assert time.monotonic() < end, "Firefox did not start"
                    time.sleep(0.5)
            driver.call("WebDriver:NewSession")
            driver.call("WebDriver:Navigate", url=page_path.as_uri())
            wait_for(lambda: driver.run("return document.body.dataset.ready"), 120)
            text = driver.run("return document.querySelector('aside').innerText")
            assert "patient P 7, 2023-02-03" in text
            for key in ("a", "c"):
                driver.press(key)
                pixels = driver.picture()
                blue, orange = lean(pixels, BLUE), lean(pixels, ORANGE)
                assert min(blue.sum(), orange.sum()) > 1000, key
                assert np.nonzero(blue)[1].mean() > np.nonzero(orange)[1].mean()
            place = "return document.getElementById('place').textContent"
            before = driver.run(place)
            driver.press("ArrowUp")
            assert driver.run(place) != before
            driver.press("h")
            assert lean(driver.picture(), BLUE).sum() == 0
        finally:
            process.terminate()
            process.wait(30)
            display.terminate()
