"""Tables of GPU rounds say what the result says, and nothing where it is silent."""

import json

import pytest

from benchmark.round_table import arms_of, tables

ROUND = {"ms_per_round": 10.539, "ms_all": [10.4, 10.678], "device_ms_per_round": 9.831}
SLOW = {"ms_per_round": 22.17, "device_ms_per_round": 9.853}


def test_a_batch_size_that_an_arm_lacks_is_a_dash_and_sizes_are_in_order():
    arms = {"ours": {"32": ROUND, "8": ROUND}, "builtin": {"8": ROUND | SLOW}}
    (table,) = tables(arms)
    assert table.splitlines() == [
        "| ms a round (of device time) | bs 8 | bs 32 |",
        "| --- | ---: | ---: |",
        "| `ours` | 10.5 (1.07 x) | 10.5 (1.07 x) |",
        "| `builtin` | 22.2 (2.25 x) | - |",
    ]


def test_long_prompts_have_a_table_of_their_own_where_they_were_measured():
    long = {"ttft_ms": 662.0, "tpot_ms": 36.612, "tokens_per_s": 192.8}
    _, table = tables({"ours": {"8": ROUND | long}, "tp1": {"8": ROUND}})
    assert table.splitlines()[2:] == ["| `ours` | 662 / 36.6 / 193 |", "| `tp1` | - |"]


def test_a_ratio_is_rounded_once():
    """17.171 over 16.424 is 1.0455: rounded to three digits and then to two it read 1.04 or 1.05, as floats fall."""
    (table,) = tables({"ours": {"1": ROUND | {"ms_per_round": 17.171, "device_ms_per_round": 16.424}}})
    assert "(1.05 x)" in table


def test_runs_that_are_far_apart_are_shown():
    """A mean of 22.5 and 19.6 read like one of 21.1 and 20.9."""
    (table,) = tables({"ours": {"8": ROUND | {"ms_all": [22.47, 19.59]}}})
    assert table.splitlines()[2] == "| `ours` | 10.5 (1.07 x), 19.6 to 22.5 |"


def test_results_are_joined_by_arm_and_an_arm_that_is_in_two_of_them_is_an_error(tmp_path):
    """Silently the later run's numbers would have stood for the earlier's."""
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    one.write_text(json.dumps({"arms": {"ours": {"8": ROUND}}}))
    other.write_text(json.dumps({"arms": {"builtin": {"8": ROUND}}}))
    assert list(arms_of([one, other])) == ["ours", "builtin"]
    with pytest.raises(ValueError, match="ours in more than one"):
        arms_of([one, one])
    assert list(arms_of([one, one, other], ["ours"])) == ["ours"], "chosen by name, the first one counts"
