"""The pages on switches name existing keys."""

from __future__ import annotations

import re
from pathlib import Path

import hydra
from omegaconf import OmegaConf

from medseg.conf_folder import conf_dir

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("switches.md", "optimisation.md")


def test_every_key_is_one_of_the_configuration() -> None:
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        roots = [
            OmegaConf.to_container(hydra.compose(root, given))
            for root, given in (("plan", ["run_dir=none"]), ("predict", []))
        ]
    texts = [(ROOT / "docs" / page).read_text(encoding="utf-8") for page in PAGES]
    named = {
        key
        for code in re.findall(r"`([^`]+)`", "\n".join(texts))
        for key in re.findall(r"(?:^| )([a-z_.]+)=", code)
    }
    assert len(named) > 20
    missing = {
        key
        for key in named - {"experiment"}
        if not any(has(root, key.split(".")) for root in roots)
    }
    assert not missing


def has(node: object, key: list[str]) -> bool:
    return not key or (isinstance(node, dict) and key[0] in node and has(node[key[0]], key[1:]))
