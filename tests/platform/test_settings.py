"""Settings: what is refused and how it is said, what wins, and that no password is ever shown."""

import json
import re
import traceback
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import pytest

from forgekeeper.delivery import boot
from forgekeeper.delivery.boot import load_settings
from forgekeeper.platform.settings import PREFIX, BatchFacts, Settings, SettingsError, build_settings_class
from forgekeeper.platform.settings.reading import MASK, list_settings
from forgekeeper.platform.settings.secret_files import list_secret_settings
from tests.harness.settings import settings_with

SECRET = "hunter2"
WEBHOOK_SECRET = "whsec_aHVudGVyMmh1bnRlcjJodW50ZXIyaHVudGVyMg=="
DATABASE_URLS = [
    "postgresql://u:hunter2@h/d",
    "postgres://u:hunter2@h1:5432,h2:5433/d?sslmode=require",
    "postgresql://u:hunter2@h1,h2/d",
    "postgresql://u:hunter2@h1:5433,h2/d?target_session_attrs=any",
    "postgresql://u@/d?host=/run/postgresql&password=hunter2",
    "host=h dbname=d password=hunter2",
]
MALFORMED_DATABASE_URLS = [
    "postgresql://u:p@hunter2@h/d",
    "postgresql://u:hunter2/x@h/d",
    "postgresql://u:5432/hunter2@h/d",
    "postgresql://u:hunter2@h:hunter2/d",
    "postgresql://u:hunter2%zz@h/d",
    "postgresql://u:hunter2@h/d?unknown=hunter2",
    "mysql://u:hunter2@h/d",
    "host=h password='hunter2",
]
REDIS_URLS = [
    "redis://:hunter2@h:6379/0",
    "rediss://u:hunter2@h",
    "redis+sentinel://:hunter2@h1:26379,h2,[::1]:5/main/0?sentinel_password=hunter2",
    "rediss+sentinel://h/main?password=hunter2&ssl_ca_certs=ca.pem",
    "unix://:hunter2@/run/redis.sock?db=1",
    "unix:///run/redis.sock?password=hunter2",
]
MALFORMED_REDIS_URLS = [
    "redis://h:6379/0?protocol=2",
    "redis://:p/hunter2@h/0",
    "redis://:hunter2?@h/0",
    "redis://:hunter2#x@h/0",
    "redis://:hunter2@h:port/0",
    "redis://:hunter2@[h/0",
    "redis://h/hunter2",
    "redis://h/0?unknown=hunter2",
    "redis://h/0?ssl_cert_reqs=required&password=hunter2",
    "rediss://h/0?ssl_cert_reqs=hunter2",
    "redis+sentinel://:hunter2@h/0/main",
    "redis+sentinel://:p/hunter2@h/main",
    "redis+sentinel://h:hunter2/main",
    "redis+sentinel://h/main?hunter2",
    "redis+sentinel://h/main?unknown=hunter2",
    "redis+sentinel://h?password=hunter2",
    "redis:hunter2",
    "http://:hunter2@h/0",
]
URLS = [("DATABASE_URL", url) for url in DATABASE_URLS] + [("REDIS_URL", url) for url in REDIS_URLS]
MALFORMED_URLS = [("DATABASE_URL", url) for url in MALFORMED_DATABASE_URLS]
MALFORMED_URLS += [("REDIS_URL", url) for url in MALFORMED_REDIS_URLS]
STORES = [
    '{"artifacts": "s3://',
    '{"artifacts": 5, "hunter2',
    '["s3://hunter2@b"]',
    '{"artifacts": {"url": "hunter2"}}',
]


@pytest.fixture
def given(monkeypatch):
    """Put settings into the environment."""

    def put(**values):
        for name, value in values.items():
            monkeypatch.setenv(PREFIX + name, value)

    return put


@pytest.fixture
def refused(given):
    """Put settings into the environment and return the message that refuses them."""

    def load_and_fail(**values):
        given(**values)
        with pytest.raises(SettingsError) as refusal:
            load_settings()
        return str(refusal.value)

    return load_and_fail


def test_an_unknown_name_is_refused_with_the_name_it_resembles(refused):
    message = refused(REDISURL="redis://h")

    assert "unknown setting FORGEKEEPER_REDISURL (did you mean FORGEKEEPER_REDIS_URL?)" in message


# The webhook


@pytest.mark.parametrize(
    "url",
    [
        "file:///hunter2",
        "ftp://h/hunter2",
        "//h/hunter2",
        "https:///hunter2",
        "https://h:p/hunter2",
        "http://h/hunter2 x",
    ],
)
def test_a_webhook_is_an_address_of_http_or_https(refused, url):
    message = refused(WEBHOOK_URL=url, WEBHOOK_SECRET=WEBHOOK_SECRET)

    assert "bad value of FORGEKEEPER_WEBHOOK_URL: not a URL such as https://host/path" in message
    assert SECRET not in message


def test_a_webhook_has_no_password_in_its_address(refused):
    message = refused(WEBHOOK_URL="https://u:hunter2@h/x", WEBHOOK_SECRET=WEBHOOK_SECRET)

    assert "write a token into the path or the query" in message
    assert SECRET not in message


@pytest.mark.parametrize("secret", ["hunter2", "whsec_", "whsec_hunter2", "whsec_c2hvcnQ=", WEBHOOK_SECRET[6:]])
def test_a_secret_that_is_short_or_no_base64_is_refused_with_the_command_that_makes_one(refused, secret):
    message = refused(WEBHOOK_SECRET=secret)

    assert "openssl rand -base64 32" in message
    assert SECRET not in message


def test_a_webhook_without_a_secret_is_refused(refused):
    assert "FORGEKEEPER_WEBHOOK_URL needs a secret" in refused(WEBHOOK_URL="https://h/x")


# Sentry


@pytest.mark.parametrize("dsn", ["https://h/1", "https://hunter2@h", "ftp://hunter2@h/1", "https://hunter2@h:p/1", "x"])
def test_a_dsn_that_is_none_is_refused_without_its_key(refused, dsn):
    message = refused(SENTRY_DSN=dsn)

    assert "bad value of FORGEKEEPER_SENTRY_DSN: not a DSN such as https://KEY@host/1" in message
    assert SECRET not in message


# Secrets in files

SECRETS = {
    "DATABASE_URL": ("postgresql://u:hunter2@h/d", lambda settings: settings.require_database()),
    "REDIS_URL": ("redis://:hunter2@h/0", lambda settings: settings.require_redis()),
    "OBJECT_STORES": ('{"a": "file:///x"}', lambda settings: settings.object_stores["a"].get_secret_value()),
    "WEBHOOK_URL": ("https://h/hunter2", lambda settings: settings.webhook_url.get_secret_value()),
    "SENTRY_DSN": ("https://hunter2@h/1", lambda settings: settings.sentry_dsn.get_secret_value()),
    "WEBHOOK_SECRET": (WEBHOOK_SECRET, lambda settings: settings.webhook_secret.get_secret_value()),
}


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_each_setting_with_secrets_may_be_in_a_file(given, tmp_path, name, end):
    value, read = SECRETS[name]
    (tmp_path / "secret").write_bytes((value + end).encode())
    beside = {"WEBHOOK_SECRET": WEBHOOK_SECRET} if name == "WEBHOOK_URL" else {}
    given(**{f"{name}_FILE": str(tmp_path / "secret")}, **beside)

    assert read(load_settings()) in value
    assert shown(name).source == "file"


def test_settings_with_secrets_are_all_that_may_be_in_files():
    assert sorted(name.upper() for name in list_secret_settings(Settings)) == sorted(SECRETS)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        (b"", "it is empty"),
        (b"\n", "it is empty"),
        (b"\xff", "not UTF-8"),
        (b"x" * 70_000, "65536"),
    ],
)
def test_a_file_without_a_value_is_refused_with_a_reason_and_without_its_content(refused, tmp_path, content, reason):
    file = tmp_path / SECRET
    if content is not None:
        file.write_bytes(content)

    message = refused(REDIS_URL_FILE=str(file))

    assert "cannot read the file that FORGEKEEPER_REDIS_URL_FILE names: " in message
    assert (reason in message, SECRET in message) == (True, False)


def test_a_secret_is_given_once(refused, tmp_path):
    message = refused(REDIS_URL_FILE=str(tmp_path / "secret"), REDIS_URL="redis://h")

    assert "both FORGEKEEPER_REDIS_URL and FORGEKEEPER_REDIS_URL_FILE are set: remove one of them" in message


def test_a_setting_without_secrets_is_in_no_file(refused):
    assert "unknown setting FORGEKEEPER_LOG_LEVEL_FILE" in refused(LOG_LEVEL_FILE="/x")


def test_names_without_the_prefix_are_not_ours(monkeypatch):
    monkeypatch.setenv("REDIS_URL", "nonsense")
    Path(".env").write_text("DATABASE_URL=nonsense\n")

    assert load_settings().redis_url is load_settings().database_url is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("DEAD_AFTER", value) for value in ("0", "-1", "-0.5", "soon", "PT5S", "00:05", "inf", "nan")),
        *(("WORKER_THREADS", value) for value in ("0", "-1", "1.5", "many")),
        *(("PACE_PRUNE", value) for value in ("0", "-1", "nan", "slow")),
        ("CRON_PRUNE", "hourly"),
        ("CATCH_UP_PRUNE", "twice"),
        *(("FAILPOINTS", f"prune.deleted{fault}") for fault in ("", "=", "=die", "=kill*", "=kill*-1")),
        ("LOG_LEVEL", "info"),
        ("LOG_FORMAT", "xml"),
        *MALFORMED_URLS,
        *(("OBJECT_STORES", value) for value in STORES),
    ],
)
def test_a_bad_value_is_refused_by_its_name(refused, name, value):
    message = refused(**{name: value})

    assert f"{PREFIX}{name} " in message.replace(":", " ")


def test_every_problem_is_in_the_one_message(refused):
    bad = {"DATABASE_URL": "x", "OBJECT_STORES": "{", "CRON_PRUNE": "x", "DEAD_AFTER": "x", "UNKNOWN": "x"}

    message = refused(**bad)

    assert [name for name in bad if PREFIX + name not in message] == []


PLACES = {"OBJECT_STORES": '{"artifacts": "file:///srv/a", "lfs": "file:///srv/b"}'}


@pytest.mark.parametrize("folder", ["", "/", "/up", "up//ci", "..", "up/../ci", "./up", "up\u0000", "up\n"])
def test_a_folder_that_no_object_lies_in_is_refused(refused, folder):
    message = refused(**PLACES, OBJECT_PREFIXES=json.dumps({"artifacts": [folder]}))

    assert "FORGEKEEPER_OBJECT_PREFIXES (artifacts): " in message


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"artefacts": ["up"]}, "artefacts: not a location of FORGEKEEPER_OBJECT_STORES, which has: artifacts, lfs"),
        ({"artifacts": []}, "an empty list allows no deletion"),
        ({"artifacts": "up"}, "FORGEKEEPER_OBJECT_PREFIXES (artifacts)"),
        (["up"], "FORGEKEEPER_OBJECT_PREFIXES"),
    ],
)
def test_folders_that_would_limit_nothing_or_everything_are_refused(refused, value, said):
    assert said in refused(**PLACES, OBJECT_PREFIXES=json.dumps(value))


def test_an_empty_value_is_an_unset_one(given):
    given(DATABASE_URL="", CRON_PRUNE="", WORKER_THREADS="", CATCH_UP_WINDOW="", OBJECT_STORES="")

    assert load_settings() == settings_with()


@pytest.mark.parametrize(("name", "value"), MALFORMED_URLS + [("OBJECT_STORES", value) for value in STORES])
def test_a_refusal_shows_nothing_of_a_password(given, name, value):
    given(**{name: value})
    with pytest.raises(SettingsError) as refusal:
        load_settings()

    shown = "".join(traceback.format_exception(refusal.value))

    assert SECRET not in shown


@pytest.mark.parametrize(("name", "url"), [*URLS, ("OBJECT_STORES", '{"artifacts": "s3://hunter2@bucket"}')])
@pytest.mark.parametrize(
    "show", [repr, str, lambda settings: str([asdict(shown) for shown in list_settings(settings)])]
)
def test_settings_that_are_shown_show_no_password(given, name, url, show):
    given(**{name: url})

    shown = show(load_settings())

    assert SECRET not in shown


@pytest.mark.parametrize(
    ("name", "url", "place"),
    [
        ("DATABASE_URL", "postgresql://u:hunter2@h/d?sslpassword=hunter2", "postgresql://u@h:5432/d"),
        ("DATABASE_URL", "postgresql://u@h:6432", "postgresql://u@h:6432/u"),
        ("DATABASE_URL", "postgres://u@h1:5432,h2:5433/d?sslmode=require", "postgresql://u@h1,h2:5432,5433/d"),
        ("DATABASE_URL", "postgresql://u@h1,h2:5433/d", "postgresql://u@h1,h2:5432,5433/d"),
        ("DATABASE_URL", "host=/run/postgresql dbname=d password=hunter2", "postgresql:///run/postgresql:5432/d"),
        ("REDIS_URL", "redis://h", "redis://h:6379/0"),
        ("REDIS_URL", "redis://hunter2@h/3", "redis://h:6379/3"),
        ("REDIS_URL", "rediss://u:hunter2@h?db=4&ssl_ca_certs=ca.pem", "rediss://h:6379/4"),
        ("REDIS_URL", "redis+sentinel://:hunter2@h1,h2:5/main/3", "redis+sentinel://h1:26379,h2:5/main/3"),
        ("REDIS_URL", "unix://u:hunter2@/run/redis.sock?db=2", "unix:///run/redis.sock/2"),
    ],
)
def test_the_url_of_a_server_is_described_by_where_it_is(given, name, url, place):
    given(**{name: url})

    assert shown(name).value == place


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("file:///srv/objects", "file:///srv/objects"),
        (
            "s3://bucket/prefix?endpoint=http://h:9000&region=eu&secret_access_key=hunter2",
            f"s3://bucket/prefix?endpoint=http://h:9000&region=eu&secret_access_key={MASK}",
        ),
        ("s3://bucket?endpoint=http://u:hunter2@h", f"s3://bucket?endpoint={MASK}"),
        ("s3://key:x/hunter2@bucket", MASK),
        ("s3://bucket?secret_access_key=a#hunter2", f"s3://bucket?secret_access_key={MASK}"),
        ("s3://bucket?secret_access_key=a&hunter2", f"s3://bucket?secret_access_key={MASK}&{MASK}"),
        ("hunter2", MASK),
    ],
)
def test_an_object_store_is_described_by_its_place_and_what_is_no_secret(given, url, place):
    given(OBJECT_STORES=json.dumps({"artifacts": url}))

    assert shown("OBJECT_STORES").value == f"artifacts: {place}"


def test_a_setting_is_described_with_where_its_value_comes_from(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("FORGEKEEPER_DEAD_AFTER=7\nforgekeeper_retry_after=8\nFORGEKEEPER_LOG_LEVEL=INFO\n")
    given(DEAD_AFTER="9", LOG_LEVEL="")

    sources = {name: shown(name).source for name in ("DEAD_AFTER", "RETRY_AFTER", "LOG_LEVEL", "LOG_FORMAT")}

    assert sources == {
        "DEAD_AFTER": "environment",
        "RETRY_AFTER": ".env",
        "LOG_LEVEL": ".env",
        "LOG_FORMAT": "default",
    }
    assert (shown("DEAD_AFTER").value, shown("RETRY_AFTER").value) == ("9", "8")


def test_an_env_file_that_is_no_text_is_refused_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_bytes(b"FORGEKEEPER_LOG_LEVEL=\xff\n")

    with pytest.raises(SettingsError, match=r"^cannot read the file \.env: it is not UTF-8; "):
        load_settings()


@pytest.mark.parametrize(
    ("require", "name"), [(Settings.require_database, "DATABASE_URL"), (Settings.require_redis, "REDIS_URL")]
)
def test_a_missing_url_is_asked_for_in_a_sentence(require, name):
    with pytest.raises(SettingsError, match=rf"^FORGEKEEPER_{name} is not set: set it to a URL such as .*://"):
        require(settings_with())


@pytest.mark.parametrize(
    ("cron", "own", "window"),
    [
        ("* * * * *", None, timedelta(hours=1)),
        ("0 4 * * *", None, timedelta(days=1)),
        ("0 4 * * mon", None, timedelta(weeks=1)),
        ("off", None, timedelta(hours=1)),
        ("0 4 * * *", "60", timedelta(minutes=1)),
    ],
)
def test_a_missed_tick_is_caught_up_within_a_period_at_least_an_hour_or_as_set(cron, own, window):
    settings = settings_with(cron_prune=cron, catch_up_window=own)

    assert settings.max_tick_age("prune") == window


def test_a_batch_has_settings_of_its_own():
    made = build_settings_class((BatchFacts("weed", "5 * * * *"),))

    fields = made.model_fields.keys() - Settings.model_fields.keys()

    assert fields == {
        *("cron_weed", "catch_up_weed", "pace_weed", "audit_weed", "max_per_run_weed", "max_per_day_weed"),
    }
    assert (
        str(made().schedule_of("weed")),
        made().missed_tick_policy("weed"),
        made().max_records_per_second("weed"),
    ) == ("5 * * * *", "once", None)


def test_a_batch_that_the_settings_do_not_know_is_an_error_and_not_off():
    with pytest.raises(AttributeError, match="cron_weed"):
        build_settings_class((BatchFacts("moss", "5 * * * *"),))().schedule_of("weed")


def test_a_batch_whose_setting_would_be_another_s_is_refused():
    with pytest.raises(
        SettingsError, match=r"rename the batch window: FORGEKEEPER_CATCH_UP_WINDOW is already a setting"
    ):
        build_settings_class((BatchFacts("window", "* * * * *"),))


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ("workers,nowhere", r"names nowhere, which cannot be imported .*No module named 'nowhere'"),
        ("json", "names json, which declares no batch"),
        *((names, "BATCHES: .* is not a module") for names in ("a b", "workers,", "../workers", "workers.py!")),
    ],
)
def test_modules_that_are_none_or_declare_nothing_stop_the_start(refused, modules, said):
    assert re.search(said, refused(BATCHES=modules))


def test_a_module_that_declares_a_known_name_stops_the_start_and_both_are_named(monkeypatch, tmp_path):
    again = (
        "from datetime import timedelta\nfrom forgekeeper import batch\nTIME = timedelta(1)\n"
        "@batch(cron='off', budget=TIME, time_limit=TIME, outcome=dict)\n"
        "def prune(now):\n    'Remove.'\n    return []\n"
    )
    (tmp_path / "again.py").write_text(again)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(PREFIX + "BATCHES", "workers,again")
    known = boot.settings_class()

    with pytest.raises(SettingsError, match=r"prune is declared twice, in workers\.prune and in again; rename one"):
        load_settings()

    assert boot.settings_class() is known


def shown(name):
    (found,) = [setting for setting in list_settings(load_settings()) if setting.name == PREFIX + name]
    return found
