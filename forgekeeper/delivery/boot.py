"""Import the modules of batches, and read the settings that they declare."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules

from forgekeeper.api.answers import Mistake
from forgekeeper.api.batches import BATCHES, all_declared
from forgekeeper.platform.settings import PREFIX, BatchFacts, Settings, SettingsError, build_settings_class, reading

FORGES_PACKAGE = "forges"
"""The package with a package for each kind of forge; its module `signs` has the marks that identify that forge."""


def load_settings() -> Settings:
    """Import the modules of the setting `batches`, and read all settings.

    Raises `SettingsError`.
    """
    import_batches(reading.read_modules())
    return reading.read_settings(settings_class())


def settings_class() -> type[Settings]:
    """Return the settings of a process with the declared batches.

    Raises `SettingsError` if names clash.
    """
    return build_settings_class(
        tuple(
            BatchFacts(
                one.name, one.cron, one.deletes_records, any(each.counted_byte_fields for each in (one, *one.children))
            )
            for one in BATCHES.values()
        )
    )


def import_batches(modules: Iterable[str]) -> None:
    """Import *modules* and the signs of all forges.

    Raises `SettingsError` if a module cannot be imported, declares nothing, or declares a name twice.
    """
    for forge in iter_modules(import_module(FORGES_PACKAGE).__path__, f"{FORGES_PACKAGE}."):
        if forge.ispkg:
            import_module(f"{forge.name}.signs")
    for name in modules:
        try:
            import_module(name)
        except Mistake as mistake:
            raise SettingsError(f"{PREFIX}BATCHES names {name}: {mistake}") from mistake
        except Exception as error:
            error_text = f"{type(error).__name__}: {error}"
            hint = "add its folder to PYTHONPATH, or install the module"
            raise SettingsError(
                f"{PREFIX}BATCHES names {name}, which cannot be imported ({error_text}); {hint}"
            ) from error
        if not any(f"{one.module}.".startswith(f"{name}.") for one in all_declared()):
            raise SettingsError(
                f"{PREFIX}BATCHES names {name}, which declares no batch: declare a batch there with `@batch`"
            )
