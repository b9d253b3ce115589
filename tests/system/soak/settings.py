"""How services are set during a soak: so slow a pace, and time-outs so short, that most faults hit a run."""

from __future__ import annotations

from forgekeeper.api.batches import BATCHES

SECRET = "swordfish-9b1c"
"""The password in every URL that a service is given."""
DEAD_AFTER = 2.0
CRONS = dict.fromkeys(BATCHES, "*/2 * * * * *") | {"user_status_cleanup": "* * * * * *", "prune": "*/3 * * * * *"}
PERIODS = {batch: {"*/2": 2, "*": 1, "*/3": 3}[cron.split()[0]] for batch, cron in CRONS.items()}
STATEMENT_TIMEOUT = 5.0
SHUTDOWN_TIMEOUT = 10.0
OUTLIVED = SHUTDOWN_TIMEOUT + 5
"""A process that lives for so many seconds after its SIGTERM, and those for which the machine held it up, outlives it."""
PACES = {f"pace_{batch}": "8" for batch in BATCHES if batch != "prune"}
ENVIRONMENT = {f"cron_{batch}": cron for batch, cron in CRONS.items()} | PACES
ENVIRONMENT |= {
    "dead_after": str(DEAD_AFTER),
    "retry_after": "1",
    "poll_interval": "1",
    "database_connect_timeout": "2",
    "database_statement_timeout": str(STATEMENT_TIMEOUT),
    "database_idle_timeout": "3",
    "database_network_timeout": "4",
    "redis_timeout": "2",
    "store_timeout": "4",
    "scheduler_timeout": "1",
    "shutdown_timeout": f"{SHUTDOWN_TIMEOUT:g}",
    "object_visibility": "5",
    "upload_visibility": "10",
    "bucket_silent_after": "4",
    "metrics_port_scheduler": "0",
}
"""Little patience, and so slow a pace that most faults hit a run."""
PATIENT = {
    "dead_after": "15",
    "database_connect_timeout": "15",
    "database_lock_timeout": "5",
    "database_statement_timeout": "9",
    "database_idle_timeout": "9",
    "database_network_timeout": "15",
    "redis_timeout": "15",
    "store_timeout": "15",
    "scheduler_timeout": "5",
}
"""More of it for when the faults are over: that the machine is busy must not be another one."""
ORPHANS = 20.0
"""So long may the processes of a master that was killed take to end."""
PAUSE = 0.05
