"""What can go wrong in the set-up, each told in one line: what happened, where, and what to do."""

import re
from urllib.parse import urlsplit, urlunsplit


class SetupProblem(Exception):
    """A set-up that cannot go on. The text is one line for the person who started it."""

    def __init__(self, text: str) -> None:
        super().__init__(" ".join(text.split()))


CAUSES = (
    (
        r"No space left on device|os error 28|Disk quota exceeded",
        "the disk of {cache} (or the one for temporary files) is full; free some space or set DCR_CACHE "
        "(TMPDIR) to a folder on a larger disk",
    ),
    (
        r"certificate verify failed|CERTIFICATE_VERIFY_FAILED|invalid peer certificate|UnknownIssuer"
        r"|SSL certificate problem",
        "the certificate of {index} is not trusted; set SSL_CERT_FILE to the file with your network's certificates",
    ),
    (
        # In the words of pip, of uv, of cargo, and of more than one.
        r"NewConnectionError|ConnectTimeout|ReadTimeout|Failed to establish a new connection"
        r"|Max retries exceeded|error sending request|dns error|tcp connect error|client error \(Connect\)"
        r"|operation timed out|Could not resolve host|Could ?n[o']t connect to server|Failed to connect to"
        r"|spurious network error|Connection refused|Network is unreachable"
        r"|Temporary failure in name resolution|Name or service not known",
        "{index} cannot be reached; check the network, or name an index that can be ({setting})",
    ),
    (
        r"(?:status code|HTTP status|HTTP error|error:|got)[^\n]{0,30}?\b(?P<found>40[137]|429|50[0234])\b",
        "{index} answered with HTTP status {found}; check its address and your access to it ({setting})",
    ),
    (
        r"(?:No matching distribution found for|Because there is no version of) (?P<found>\S+)"
        r"|Because (?P<name>\S+) was not found in the package registry",
        "{index} does not serve {found}; name an index that does ({setting}), or change the pin and run `make lock`",
    ),
    (
        r"needs to be updated but --locked was passed|cannot update the lock file",
        "Cargo.lock does not fit the Cargo.toml files; run `cargo update --workspace` in the checkout",
    ),
)
"""What a command prints, and what that means for the person who waits for it. The first match counts."""


def explain(
    what: str, output: str, *, status: int, log: str, cache: str, index: tuple[str, str] | None
) -> SetupProblem:
    """One line for a failed command from what it printed.

    `index` is how to name the index it asked and the setting that chooses another, None if it asked none;
    `cache` is the folder that fills up; `log` holds the whole output.
    """
    name, setting = index or ("", "")
    for pattern, meaning in CAUSES:
        if index is None and "{index}" in meaning:
            continue
        if match := re.search(pattern, output):
            found = next((group for group in match.groups() if group), None)
            text = meaning.format(cache=cache, index=name, setting=setting, found=found)
            return SetupProblem(f"{what}: {text} (output: {log})")
    how = f"ended by signal {-status}" if status < 0 else f"failed with exit status {status}"
    return SetupProblem(f"{what}: {how}: {telling_line(output)} (output: {log})")


def telling_line(output: str) -> str:
    """The line that most likely says why: the first error, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(error|ERROR|fatal)\b", line)]
    return (errors or lines[-1:] or ["it printed nothing"])[0]


def without_credentials(url: str) -> str:
    """The address as it may be shown: user name and password removed."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
