"""The native part, imported when it is first needed: sources and reports work without it."""

import importlib
import re
from types import ModuleType

from dcr_training.errors import RefitError

# A refit that failed because somebody else was late also says what was waited for, and more.
_TIMEOUT = re.compile(r"waited \S+ for (the coordinator to prepare a refit|the refit to end)")


def load() -> ModuleType:
    """`dcr._native`; `RefitError` when it can't be imported."""
    try:
        return importlib.import_module("dcr._native")
    except ImportError as error:
        reason = f"dcr's native part can't be imported ({error}): install dcr-refit in this environment"
        raise RefitError(reason) from error


def timed_out(error: Exception) -> bool:
    """Whether a native call only ran out of the time that it was given."""
    return bool(getattr(error, "timed_out", False)) or _TIMEOUT.fullmatch(str(error)) is not None
