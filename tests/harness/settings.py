"""Settings as a test wants them: of the batches that are declared, with what is named changed."""

from forgekeeper import boot


def settings_with(**options):
    return boot.model()(**options)
