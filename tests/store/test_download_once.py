"""One process of a machine downloads what several need."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tidemill.store.download_once import download_once, remove_download


def bring(folder: Path, content: str, calls: list[str]) -> str:
    calls.append(content)
    folder.mkdir(exist_ok=True)
    (folder / "part").write_text(content)
    return content


def test_one_of_several_processes_downloads(tmp_path: Path) -> None:
    folder, calls = tmp_path / "run" / "restored", []
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(download_once, folder, "4", lambda: bring(folder, "four", calls)) for _ in range(8)]
    assert sorted(str(future.result()) for future in asked) == ["None"] * 7 + ["four"]
    assert calls == ["four"]


def test_other_content_of_the_folder_is_replaced(tmp_path: Path) -> None:
    folder, calls = tmp_path / "restored", []
    for name in ("4", "6", "6"):
        download_once(folder, name, lambda name=name: bring(folder, name, calls))
    assert (calls, (folder / "part").read_text()) == (["4", "6"], "6")
    remove_download(folder)
    remove_download(folder)
    assert download_once(folder, "6", lambda: bring(folder, "again", calls)) == "again"


def test_an_interrupted_download_is_repeated(tmp_path: Path) -> None:
    folder = tmp_path / "restored"
    code = (
        "import os, sys; from pathlib import Path; from tidemill.store.download_once import download_once\n"
        "download_once(Path(sys.argv[1]), '4', lambda: (Path(sys.argv[1]).mkdir(), os._exit(9)))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False, timeout=300).returncode == 9
    assert folder.is_dir()
    assert download_once(folder, "4", lambda: "whole") == "whole"

    def fails() -> str:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        download_once(folder, "5", fails)
    assert download_once(folder, "4", lambda: "4 again") == "4 again"
