"""One frozen object, one reader of the environment; what it does not know is an error."""

from dataclasses import FrozenInstanceError

import pytest

from sglang_pp_spec.core.settings import Settings

SWITCH = "SGLANG_ENABLE_PP_SPEC"
P = "SGLANG_PP_SPEC_"


def read(**environ):
    return Settings.from_environment(environ)


def test_an_empty_environment_means_off():
    assert read() == Settings() and not Settings().enabled


@pytest.mark.parametrize("text", ["1", "true", "TRUE", "yes", "y", "on", "t"])
def test_every_word_for_yes_switches_it_on(text):
    assert read(**{SWITCH: text}).enabled


@pytest.mark.parametrize("text", ["", "0", "false", "False", "no", "off", "n", "f"])
def test_every_word_for_no_leaves_it_off(text):
    assert not read(**{SWITCH: text}).enabled


@pytest.mark.parametrize(
    ("environ", "field", "value"),
    [
        ({P + "CPU_ENGINE": "1"}, "cpu_engine", True),
        ({P + "ON_MISMATCH": "abort"}, "on_mismatch", "abort"),
        ({P + "TIMELINE": "/somewhere"}, "timeline", "/somewhere"),
        ({P + "STAGE_DELAY_MS": "2.5"}, "stage_delay_ms", 2.5),
        ({P + "DRAFT_DELAY_MS": "0"}, "draft_delay_ms", 0.0),
        ({P + "POISON": "1"}, "poison", True),
        ({P + "STREAMS": "1"}, "streams", True),
        ({P + "SLOT_FILL": "8"}, "slot_fill", 8),
    ],
)
def test_each_key_sets_its_field_and_no_other(environ, field, value):
    settings = Settings.from_environment(environ)
    assert getattr(settings, field) == value
    changed = {name for name in vars(settings) if getattr(settings, name) != getattr(Settings(), name)}
    assert changed <= {field}


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (SWITCH, "maybe"),
        (P + "CPU_ENGINE", "2"),
        (P + "ON_MISMATCH", "ignore"),
        (P + "ON_MISMATCH", ""),
        (P + "SLOT_FILL", "0"),
        (P + "SLOT_FILL", "-3"),
        (P + "SLOT_FILL", "all"),
        (P + "STAGE_DELAY_MS", "-1"),
        (P + "STAGE_DELAY_MS", "nan"),
        (P + "STAGE_DELAY_MS", "60000"),
        (P + "DRAFT_DELAY_MS", "fast"),
        (P + "FRAME_TIMEOUT_S", "0"),
        (P + "FRAME_TIMEOUT_S", "0.5"),
    ],
)
def test_a_value_out_of_range_names_key_and_value(key, text):
    with pytest.raises(ValueError, match=f"{key}='{text}'"):
        Settings.from_environment({key: text})


def test_an_unknown_key_is_an_error_and_the_known_ones_are_listed():
    with pytest.raises(ValueError, match=rf"unknown setting\(s\) {P}ON_MISMATHC; known: .*{P}ON_MISMATCH"):
        Settings.from_environment({P + "ON_MISMATHC": "abort"})


def test_other_peoples_keys_are_left_alone():
    assert Settings.from_environment({"SGLANG_OTHER": "x", "PATH": "/bin"}) == Settings()


def test_settings_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        Settings().enabled = True
