"""Steps around the training of a run."""

from __future__ import annotations

from pathlib import Path

from medseg.runs.train_run import remove_parts


def test_half_written_files_are_removed_and_files_of_the_user_stay(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    parts = [tmp_path / ".medseg-1.part", tmp_path / "checkpoints" / ".medseg-2.part.ckpt"]
    own = [tmp_path / "notes.tmp", tmp_path / "checkpoints" / "last.ckpt"]
    for path in (*parts, *own):
        path.write_text("x")
    remove_parts(tmp_path)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(own)
