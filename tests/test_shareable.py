"""What of a record may leave the machine (jetrl/launch/shareable.py); kept runs as a whole: test_experiments.py."""

import pytest

from jetrl.launch.shareable import clean_text


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("no file in /srv/data/m.", "no file in .../m."),
        ("/srv/a/one:/srv/b/two", ".../one:.../two"),
        ("https://host/a/b s3://bucket/a/b a/b/c ~/a/b", "https://host/a/b s3://bucket/a/b a/b/c ~/a/b"),
        ("https://me:pass@host/a", "https://***@host/a"),
        ("token hf_abcdefghijklmnopqrst", "token ***"),
    ],
)
@pytest.mark.parametrize("folder", ["/", "/usr"])
def test_paths_and_secrets_go_and_addresses_stay_wherever_it_runs(text, kept, folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert clean_text(text) == kept


def test_only_what_lies_below_the_working_directory_is_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert clean_text(f"x={tmp_path}/runs/a /srv{tmp_path}/runs/b") == "x=runs/a .../b"
