"""Every setting: its name, type, default and sentence.

Settings are environment variables with the prefix ``FORGEKEEPER_``, or lines of a ``.env`` file in the working
directory; the environment wins.  Settings with secrets may be in files (`secret_files`).  An unknown name or a bad
value stops the start (`forgekeeper.platform.settings.reading`).  Each batch's declaration adds settings of its own
(`build_settings_class`).
"""

from __future__ import annotations

import re
from datetime import timedelta
from functools import cache
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    Json,
    PlainValidator,
    SecretStr,
    ValidationInfo,
    create_model,
    field_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from forgekeeper.platform import failpoints
from forgekeeper.platform.settings import cron
from forgekeeper.platform.settings.addresses import (
    Unverified,
    check_database_url,
    check_redis_url,
    check_sentry_dsn,
    check_webhook_secret,
    check_webhook_url,
)
from forgekeeper.platform.settings.cron import Cron

PREFIX = "FORGEKEEPER_"
PACE_SENTENCE = "Maximum records that a run or child of {} deletes per second; unset: no limit."
AUDIT_SENTENCE = "Deletions of this batch that the audit records: all, or off; unset: as FORGEKEEPER_AUDIT."
RECORD_LIMIT_SENTENCES = {
    "max_per_run": "Maximum records that a run of this batch deletes, with its children; unset: no limit.",
    "max_per_day": "Maximum records that all runs of this batch delete in a day (UTC); unset: no limit.",
}
BYTE_LIMIT_SENTENCES = {
    "max_bytes_per_run": "Maximum bytes that a run of this batch deletes, with its children; unset: no limit.",
    "max_bytes_per_day": "Maximum bytes that all runs of this batch delete in a day (UTC); unset: no limit.",
}

DeletionPlace = Literal["repositories", "artifacts", "stores"]
"""The place outside the database from which a batch deletes: repositories, artifacts' stores, or all stores."""


def _parse_seconds(value: object) -> object:
    """Convert a number of seconds."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError("not a number of seconds") from None


def _check_folders(value: tuple[str, ...]) -> tuple[str, ...]:
    """Return folders without trailing slashes; raise `ValueError` for a bad folder or none."""
    folders = tuple(folder.removesuffix("/") for folder in value)
    if not folders:
        raise ValueError("an empty list allows no deletion: name a folder, or leave the location out")
    for folder in folders:
        parts = folder.split("/")
        if {"", ".", ".."}.intersection(parts) or not folder.isprintable():
            raise ValueError(f"{folder!r} is not a folder of a store: write a/b, without leading slash, '.' or '..'")
    return folders


def _parse_modules(value: object) -> tuple[str, ...]:
    names = tuple(name.strip() for name in str(value).split(","))
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"{name!r} is not a module: name modules such as workers, separated by commas")
    return tuple(dict.fromkeys(names))


def _parse_networks(value: object) -> tuple[Network, ...]:
    networks = []
    for text in (part.strip() for part in str(value).split(",")) if value else ():
        try:
            network = ip_network(text)
        except ValueError:
            raise ValueError(f"{text!r} is not an address: write addresses or networks such as 10.0.0.0/28") from None
        if network.prefixlen == 0:
            raise ValueError(f"{text} contains every address: name the proxies")
        networks.append(network)
    return tuple(networks)


def _check_schema(value: str) -> str:
    if not re.fullmatch(r"(?!pg_)[a-z_][a-z0-9_]{0,62}", value):
        raise ValueError("not the name of a schema: use lower-case letters, digits and _, as in forgekeeper")
    return value


def _check_header(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9-]+", value):
        raise ValueError("not the name of a header such as X-Forwarded-User")
    return value


# Types of settings, each with its parser and the type's name in the documentation.  The limit is three weeks because
# PostgreSQL counts its timeouts in milliseconds, in 31 bits.
Text = Annotated[str, "text"]
Duration = Annotated[
    timedelta, BeforeValidator(_parse_seconds), Field(gt=timedelta(0), le=timedelta(weeks=3)), "seconds"
]
Visibility = Annotated[Duration, Field(ge=timedelta(seconds=2))]
Grace = Annotated[timedelta, BeforeValidator(_parse_seconds), Field(ge=timedelta(0)), "seconds"]
Schedule = Annotated[Cron | None, PlainValidator(cron.parse_schedule), NoDecode, "cron"]
Schema = Annotated[str, AfterValidator(_check_schema), "text"]
DatabaseUrl = Annotated[SecretStr, AfterValidator(check_database_url), "URL"]
RedisUrl = Annotated[SecretStr, AfterValidator(check_redis_url), "URL"]
WebhookUrl = Annotated[SecretStr, AfterValidator(check_webhook_url), "URL"]
WebhookSecret = Annotated[SecretStr, AfterValidator(check_webhook_secret), "text"]
SentryDsn = Annotated[SecretStr, AfterValidator(check_sentry_dsn), "URL"]
Share = Annotated[float, Field(ge=0, le=1), "share, 0 to 1"]
Pace = Annotated[float, Field(gt=0), "per second"]
Count = Annotated[int, Field(ge=1), "count"]
Bytes = Annotated[int, Field(ge=1), "bytes"]
Days = Annotated[int, Field(ge=31, le=36_500), "days"]
Port = Annotated[int, Field(ge=0, le=65535), "port"]
ObjectStores = Annotated[Json[dict[str, SecretStr]], NoDecode, "JSON"]
ObjectPrefixes = Annotated[
    Json[dict[str, Annotated[tuple[str, ...], AfterValidator(_check_folders)]]], NoDecode, "JSON"
]
Network = IPv4Network | IPv6Network
Networks = Annotated[tuple[Network, ...], PlainValidator(_parse_networks), NoDecode, "addresses"]
Header = Annotated[str, AfterValidator(_check_header), "text"]
Modules = Annotated[tuple[str, ...], PlainValidator(_parse_modules), NoDecode, "text"]
CatchUp = Literal["once", "skip"]
Failpoints = Annotated[failpoints.Failpoints, PlainValidator(failpoints.parse_failpoints), NoDecode, "failpoints"]


def setting(default: Any, sentence: str) -> Any:
    """Declare a setting: its default, written as an operator would, and its description."""
    return Field(default=default, description=sentence, validate_default=True)


class SettingsError(Exception):
    """The settings cannot be used; the message names each bad setting and the cure."""


class BatchFacts(NamedTuple):
    """The facts that determine the settings of one batch.

    A batch that *counts_records* its deletions has limits of records; a batch that *counts_bytes* has limits of bytes,
    too.
    """

    name: str
    cron: str
    counts_records: bool = True
    counts_bytes: bool = False


class Settings(BaseSettings):
    """The validated settings of one process; `build_settings_class` adds the settings of batches."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="ignore", frozen=True, hide_input_in_errors=True, env_ignore_empty=True
    )

    database_url: DatabaseUrl | None = setting(None, "URL of PostgreSQL: any libpq URI, also of a socket.")
    own_schema: Schema = setting("forgekeeper", "Schema of forgekeeper's own tables.")
    forge_schema: Schema = setting("public", "Schema of the forge's tables, or of views on them.")
    redis_url: RedisUrl | None = setting(
        None, "URL of Redis: redis://, rediss:// or unix://, or of its Sentinels: redis+sentinel://."
    )
    batches: Modules = setting("workers", "Modules that declare batches, separated by commas.")
    repositories_root: Path | None = setting(None, "Folder with the bare repositories.")
    git_server: Literal["refuse", "bypass"] = setting(
        "refuse",
        "If a Git server (Gitaly) manages the repositories: refuse to delete refs, or bypass its locks and replicas.",
    )
    object_stores: ObjectStores = setting("{}", "URL of each location, as JSON: s3://, gs://, az:// or file:///.")
    objects: Literal["ours", "theirs"] = setting(
        "ours", "Outbox for the objects of destroyed artifacts: ours, or the forge's, which then deletes the objects."
    )
    object_prefixes: ObjectPrefixes = setting(
        "{}",
        "Folders in which objects may be deleted, as JSON: a list for each location. "
        "Without a list: the whole store of the location.",
    )

    catch_up_window: Duration | None = setting(
        None, "Maximum age of a late tick that still runs; by default one period, at least an hour."
    )

    breaker_share: Share = setting(
        "0.3",
        "The circuit breaker holds a batch if a run would delete more than this share of its table, and more than ten "
        "times as many records as any of the last hundred runs. 1: never.",
    )
    breaker_least: Count = setting("1000", "The circuit breaker allows every run of at most this many records.")

    queue_limit: Count = setting(
        "100000", "A batch starts no more children while this many messages wait in their queue."
    )

    dead_after: Duration = setting("15", "A process or lease without a heartbeat for this long is dead.")
    retry_after: Duration = setting("15", "Pause before the first retry of a failed run; each further pause doubles.")
    poll_interval: Duration = setting("5", "How often a scheduler reconciles each batch between ticks.")

    clock_tolerance: Duration = setting(
        "60", "Batches that delete are blocked while the clocks of PostgreSQL and Redis differ by more than this."
    )

    audit: Literal["people", "all", "off"] = setting(
        "all", "Content of the audit: acts of people, also all deletions, or nothing."
    )
    audit_keep: Days = setting("400", "Days for which the audit is kept at least; whole months are dropped.")
    actor: Text | None = setting(None, "Name of the acting person in the audit; by default user and host.")

    database_connect_timeout: Duration = setting("3", "How long a worker waits for a connection to PostgreSQL.")
    database_statement_timeout: Duration = setting("30", "PostgreSQL cancels a statement after this long.")
    database_lock_timeout: Duration = setting("1", "PostgreSQL stops waiting for a lock after this long.")
    database_idle_timeout: Duration = setting("10", "PostgreSQL ends a session that idles in a transaction this long.")
    database_network_timeout: Duration = setting(
        "15", "The kernel closes a connection to PostgreSQL without an acknowledgement for this long."
    )
    store_timeout: Duration = setting("30", "How long a worker waits for an object store to answer.")
    object_grace: Grace = setting("86400", "How long the object of a destroyed artifact is kept for a restore.")
    object_visibility: Visibility = setting("600", "Another run may claim the objects of a dead run after this long.")
    uploads_register: Literal["sorted_set", "hash"] = setting(
        "sorted_set", "Register of uploads: forgekeeper's sorted sets, or a hash of the forge."
    )
    upload_visibility: Visibility = setting("300", "Another run may claim the uploads of a dead run after this long.")
    bucket_silent_after: Duration = setting("600", "Another child may take a bucket without a heartbeat for this long.")
    unknown_locks: Literal["keep", "resolve"] = setting(
        "keep",
        "Expired artifacts whose lock the forge does not know: keep them, or look up the lock in their jobs.",
    )
    missing_repositories: Share = setting(
        "0.05",
        "If more than this share of a run's projects, and at least three, lack a repository, none counts as deleted.",
    )
    redis_timeout: Duration = setting("2", "How long a worker waits for Redis to answer.")
    scheduler_timeout: Duration = setting("2", "How long a scheduler waits for PostgreSQL or Redis to answer.")
    shutdown_timeout: Duration = setting("30", "How long a process may finish its work after SIGTERM before it ends.")

    tls_unverified: Unverified = setting("nothing", "Servers whose certificates are not verified; for tests only.")

    worker_processes: Count = setting("2", "Processes that `forgekeeper worker` starts.")
    worker_threads: Count = setting("8", "Threads of each worker process.")

    metrics_host: Text = setting("127.0.0.1", "The address of the metrics endpoints.")
    metrics_port_worker: Port = setting("9191", "The metrics endpoint of `forgekeeper worker`; 0: none.")
    metrics_port_scheduler: Port = setting("9192", "The metrics endpoint of `forgekeeper scheduler`; 0: none.")
    metrics_port_exporter: Port = setting("9193", "The metrics endpoint of `forgekeeper exporter`; 0: none.")

    webhook_url: WebhookUrl | None = setting(None, "URL that gets a request for each event; unset: none.")
    webhook_secret: WebhookSecret | None = setting(
        None, "Secret that signs these requests: whsec_ and base64, as in Standard Webhooks."
    )
    sentry_dsn: SentryDsn | None = setting(None, "DSN of the Sentry project that gets errors; unset: none.")
    tracing: Literal["off", "otlp"] = setting(
        "off", "Spans of runs and children: none, or to the collector that the OTEL_* variables name."
    )

    console_host: Text = setting("127.0.0.1", "The address of `forgekeeper console`.")
    console_port: Port = setting("9190", "The port of `forgekeeper console`; 0: none.")
    console_actions: Literal["on", "off"] = setting("off", "Whether operators may act on the console.")
    console_users: Path | None = setting(
        None, "The file of the console's users; `forgekeeper console user add` writes it."
    )
    console_tokens: Path | None = setting(
        None, "The file of the tokens of the console's API; `forgekeeper console token add` writes it."
    )
    console_proxy: Networks = setting(
        "", "Addresses or networks of proxies that authenticate the users of the console, separated by commas."
    )
    console_proxy_header: Header = setting("X-Forwarded-User", "The header in which these proxies name the user.")
    console_tls_certificate: Path | None = setting(None, "The console's certificate (PEM); with it, it serves HTTPS.")
    console_tls_key: Path | None = setting(None, "The key of that certificate.")

    log_format: Literal["json", "console"] | None = setting(None, "By default console on a terminal, else json.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = setting("INFO", "The lowest level that is logged.")
    failpoints: Failpoints = setting("", "For tests only.")

    @field_validator("object_prefixes")
    @classmethod
    def _check_locations(cls, value: ObjectPrefixes, given: ValidationInfo) -> ObjectPrefixes:
        """Refuse unknown locations: a typing error would leave the right location unlimited."""
        # Missing if the stores could not be parsed: that error is reported already.
        stores: ObjectStores = given.data.get("object_stores", value)
        unknown = sorted(value.keys() - stores.keys())
        if unknown:
            known = ", ".join(stores) or "none"
            raise ValueError(f"{', '.join(unknown)}: not a location of {PREFIX}OBJECT_STORES, which has: {known}")
        return value

    @field_validator("webhook_secret")
    @classmethod
    def _check_webhook_is_signed(cls, value: SecretStr | None, given: ValidationInfo) -> SecretStr | None:
        """Refuse a webhook without a secret: its receiver could not tell forgekeeper from others."""
        if value is None and given.data.get("webhook_url") is not None:
            raise ValueError(f"{PREFIX}WEBHOOK_URL needs a secret, which signs the requests")
        return value

    def schedule_of(self, batch: str) -> Cron | None:
        """Return the schedule of *batch*, None if it is ``off``."""
        found: Cron | None = self._batch_setting(batch, "cron")
        return found

    def missed_tick_policy(self, batch: str) -> CatchUp:
        """Return the policy for missed ticks of *batch*."""
        found: CatchUp = self._batch_setting(batch, "catch_up")
        return found

    def max_records_per_second(self, batch: str) -> float | None:
        """Return the maximum rows or objects that *batch* deletes per second, None for no limit."""
        found: float | None = self._batch_setting(batch, "pace")
        return found

    def deletion_limits(self, batch: str) -> tuple[int | None, ...]:
        """Return the limits of *batch*: records per run and day, bytes per run and day.

        None means no limit.
        """
        # A batch lacks the settings of quantities that it does not count, for example bytes.
        return tuple(vars(self).get(f"{name}_{batch}") for name in (*RECORD_LIMIT_SENTENCES, *BYTE_LIMIT_SENTENCES))

    def is_audited(self, batch: str) -> bool:
        """Return whether the deletions of *batch* are written to the audit."""
        return (self._batch_setting(batch, "audit") or self.audit) == "all"

    def max_tick_age(self, batch: str) -> timedelta:
        """Return the maximum age of a missed tick of *batch* that is caught up."""
        schedule = self.schedule_of(batch)
        period = schedule.longest_interval if schedule else timedelta(0)
        return self.catch_up_window or max(period, timedelta(hours=1))

    def _batch_setting(self, batch: str, name: str) -> Any:
        # No default: an unknown batch must not look as if it were off.
        return getattr(self, f"{name}_{batch}")

    def require_database(self) -> str:
        """Return the URL of the database; raise `SettingsError` if it is not set."""
        return _require_url("DATABASE_URL", self.database_url, "postgresql://user@host/name")

    def require_redis(self) -> str:
        """Return the URL of Redis; raise `SettingsError` if it is not set."""
        return _require_url("REDIS_URL", self.redis_url, "redis://host:6379/0")


@cache
def build_settings_class(batches: tuple[BatchFacts, ...]) -> type[Settings]:
    """Return the class of the settings of a process with these batches.

    Raises `SettingsError` if a batch's name would produce the name of an existing setting.
    """
    fields: dict[str, Any] = {}
    for batch in batches:
        of_batch = {
            "cron": (Schedule, setting(batch.cron, f"When {batch.name} runs.")),
            "catch_up": (CatchUp, setting("once", "A missed tick of this batch: run the newest once, or skip.")),
            "pace": (Pace | None, setting(None, PACE_SENTENCE.format(batch.name))),
            "audit": (Literal["all", "off"] | None, setting(None, AUDIT_SENTENCE)),
        }
        if batch.counts_records:
            of_batch |= {
                name: (Count | None, setting(None, sentence)) for name, sentence in RECORD_LIMIT_SENTENCES.items()
            }
        if batch.counts_bytes:
            of_batch |= {
                name: (Bytes | None, setting(None, sentence)) for name, sentence in BYTE_LIMIT_SENTENCES.items()
            }
        of_batch = {f"{name}_{batch.name}": field for name, field in of_batch.items()}
        if taken := sorted(of_batch.keys() & {*Settings.model_fields, *fields}):
            raise SettingsError(f"rename the batch {batch.name}: {PREFIX}{taken[0].upper()} is already a setting")
        fields |= of_batch
    made: type[Settings] = create_model("Settings", __base__=Settings, **fields)
    return made


def _require_url(name: str, value: SecretStr | None, example: str) -> str:
    if value is None:
        raise SettingsError(f"{PREFIX}{name} is not set: set it to a URL such as {example}, or try `forgekeeper demo`")
    return value.get_secret_value()
