"""The version of the package."""

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    try:
        return version("fedselect")
    except PackageNotFoundError:  # run from a checkout that was not installed
        return "uninstalled"
