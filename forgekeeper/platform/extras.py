"""Commands that install an extra: from the wheel or the clone from which forgekeeper came."""

from importlib import metadata


def install_command(extra: str) -> str:
    """Return the command that installs *extra* in addition, for a sentence."""
    try:
        version = metadata.version("forgekeeper")
    except metadata.PackageNotFoundError:
        return f"pip install '.[{extra}]' in the clone"
    wheel = f"forgekeeper-{version}-py3-none-any.whl"
    return f"pip install '{wheel}[{extra}]' in the folder of the wheel, or pip install '.[{extra}]' in a clone"
