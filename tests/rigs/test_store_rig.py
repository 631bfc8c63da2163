from __future__ import annotations

from pathlib import Path

import pytest
from store_rig import require_minio


def test_without_minio_a_test_is_skipped_but_fails_in_continuous_integration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TIDEMILL_MINIO", str(tmp_path / "minio"))
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=r"no MinIO at .*: run `make minio`"):
        require_minio()
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match=r"no MinIO at .*: run `make minio`"):
        require_minio()
    (tmp_path / "minio").touch()
    require_minio()
