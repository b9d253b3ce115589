"""How a person installs an extra: from the wheel or the clone that forgekeeper itself came from."""

from importlib import metadata


def say_how_to_install(extra: str) -> str:
    """Return the command that installs the *extra* as well, for a sentence."""
    try:
        version = metadata.version("forgekeeper")
    except metadata.PackageNotFoundError:
        return f"pip install '.[{extra}]' in the clone"
    wheel = f"forgekeeper-{version}-py3-none-any.whl"
    return f"pip install '{wheel}[{extra}]' in the folder of the wheel, or pip install '.[{extra}]' in a clone"
