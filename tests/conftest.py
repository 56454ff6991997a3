"""Fixtures that several rooms share."""

from __future__ import annotations

import ctypes
import gc
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from medseg.memory.heap import KEEP, MAP_FROM, PARAMETERS

# Tests are imported by path, not as packages: makers of volumes and networks with known answers are
# found here.
sys.path[:0] = [
    str(Path(__file__).parent / folder)
    for folder in (".", "cascade", "data", "io", "matrix", "prediction")
]

# A job in the background of a script inherits a SIGINT that is ignored, and hands it on to what
# tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# MONAI imports MLflow, which takes a second, for a handler that no test uses.
handler = ModuleType("monai.handlers.mlflow_handler")
handler.MLFlowHandler = None  # type: ignore[attr-defined]
sys.modules[handler.__name__] = handler

# Freed memory stays in the heap, see `kept_memory`.
with suppress(OSError, AttributeError):  # another C library
    library = ctypes.CDLL(None)
    library.mallopt(PARAMETERS[MAP_FROM], 32 * 2**20)
    library.mallopt(PARAMETERS[KEEP], 2**29)

# Nearly all that the imports of the tests make stays: no garbage collection looks at it.
gc.disable()


def pytest_collection_finish() -> None:
    """Keep what the imports made out of every later garbage collection: some million objects."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def quick_compositions() -> None:
    """Hydra reads each file and composes each choice of files once."""
    import quick_compose

    quick_compose.install()


@pytest.fixture(scope="session", autouse=True)
def kept_log_handlers() -> Iterator[None]:
    """A command that runs in this process leaves the handlers of logs open.

    Hydra closes them all when it sets up its own. That of absl, which TensorBoard imports, closes
    its stream too, and that is the one into which pytest captures the output.
    """
    from hydra._internal import hydra as hydra_command
    from hydra._internal.core_plugins import basic_launcher
    from hydra.core import utils

    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in (hydra_command, basic_launcher, utils):
            monkeypatch.setattr(module, "configure_log", lambda log_config, verbose: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def kept_memory() -> Iterator[None]:
    """Free memory stays between the steps of a case: the kernel would clear it for the next one.

    With the sizes that the heap keeps, this halves the system's time in tests of predictions.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        if "medseg.memory.profile" in sys.modules:
            monkeypatch.setattr("medseg.memory.profile.release_free_memory", lambda: None)
        yield


@pytest.fixture(scope="session")
def shared_ct() -> Path:
    """Folder of real chest CTs beside the checkout (`table.csv`, a folder per case), or skip."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "ct"
    if not (folder / "table.csv").is_file():
        pytest.skip("no real CTs beside the checkout")
    return folder


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Any]:
    """A function that trains as a worker does, on batches that are given, with nothing around it.

    Called as `fit(overrides, batches)`, optionally with Lightning's callbacks and a function that
    changes the module before; returns the trained module.
    """

    def run(
        overrides: Sequence[str],
        batches: Sequence[Any],
        callbacks: Sequence[Any] = (),
        change: Callable[[Any], Any] | None = None,
    ) -> Any:
        import hydra
        import torch

        from medseg.conf_folder import conf_dir
        from medseg.config.check import to_config
        from medseg.training.assemble import make_module, make_trainer
        from medseg.training.network import make_network
        from medseg.training.options import TrainConfig

        fixed = ["trainer.accelerator=cpu", "logger=none", f"run_dir='{tmp_path}'"]
        with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
            config = to_config(hydra.compose("train", [*fixed, *overrides]), TrainConfig)
        torch.manual_seed(config.seed)
        network = make_network(config)
        trainer = make_trainer(config, list(callbacks))
        module = make_module(config, network, {})
        if change is not None:
            change(module)
        trainer.fit(
            module, torch.utils.data.DataLoader([[stack] for stack in batches], batch_size=None)
        )
        return module

    return run


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validations draw nothing: their pictures take longer than the steps of a tiny run."""
    monkeypatch.setattr("medseg.training.callbacks.overlay_montage", lambda *_, **__: [])


@pytest.fixture(scope="session")
def tiny_table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Case table of four small scans, see `make_tiny_table`."""
    from tiny import make_tiny_table

    return make_tiny_table(tmp_path_factory.mktemp("tiny cases"))


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Headless Chromium with its own driver and software WebGL; every name is a closed port."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    program = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    driver_program = shutil.which("chromedriver")
    if program is None or driver_program is None:
        pytest.skip("no Chromium with its chromedriver here (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in (
        "--headless=new", "--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader",
        "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--window-size=1280,900",
        "--proxy-server=127.0.0.1:9", "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={tmp_path_factory.mktemp('browser')}",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_program))
    yield driver
    driver.quit()
