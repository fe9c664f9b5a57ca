"""How a trainer's refits are configured."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

LONGEST_S = 1e8
"""Three years: longer waits overflow what they are handed to."""
APPLICATIONS = ("asynchronous", "synchronous")


@dataclass(frozen=True)
class RefitConfig:
    """Where the relay, the commit record and the rollout servers are, and how long to wait for what.

    The run key is not part of it: it is read from `DCR_RUN_KEY_FILE` or `DCR_RUN_KEY` only.
    Raises `ValueError` for values that can't be right.
    """

    record: str
    """File of the commit record; used by training rank 0 only."""
    gates: Sequence[str] = field(default_factory=list)
    """Base URLs of the vLLM servers whose requests are held while weights change."""
    receivers: int = 1
    """How many rollout ranks must be connected before a refit starts."""
    relay: str | None = None
    """The relay's address, tcp://HOST:PORT; `DCR_RELAY` where it is None."""
    application: str = "asynchronous"
    """"asynchronous": stage and check all, then close the gate and apply. "synchronous": close it first."""
    connect_timeout_s: float = 60.0
    """For each connection to the relay."""
    peers_timeout_s: float = 300.0
    """For all owners and receivers to be connected, at the start of a refit."""
    timeout_s: float = 3600.0
    """For a whole refit."""
    source_grace_s: float = 30.0
    """Once another rank's source has failed, how long this rank's may still take for one tensor."""
    direct_projection: bool = True
    """Compare local shards of affine conversion tasks in place; without, a Megatron model is converted in full."""
    chunk_bytes: int = 256 << 20
    """Whole tensors are compared in chunks of this many bytes; 64 MiB suits object storage."""
    bucket_bytes: int = 512 << 20
    """A payload is closed once the chunks with changes in it total this many bytes of compared tensors."""
    bucket_queue: int = 2
    """Closed buckets that may wait to be encoded and sent."""
    threads: int = 0
    """Threads that compare and encode on each training rank; 0 divides the cores that a rank may use by the ranks on
    its host (`LOCAL_WORLD_SIZE`, else those with its host name), at least 1."""
    baseline_folder: str | None = None
    """A folder for the source baseline's memory, in files without a name; None keeps it in host memory."""
    check_replicas: bool = False
    """Check in every refit that copies of a shard on several ranks agree bit for bit."""
    window_bytes: int | None = None
    """Payload bytes on their way, at most; None is the default of the native part."""

    def __post_init__(self) -> None:
        self._check_kinds()
        if not self.record:
            raise ValueError("refit configuration: `record` must name the file of the commit record")
        if isinstance(self.gates, str):
            raise ValueError(f"refit configuration: `gates` must be a list of URLs, not {self.gates!r}")
        for gate in self.gates:
            if not str(gate).startswith(("http://", "https://")):
                raise ValueError(f"refit configuration: gate {gate!r} is not an http:// or https:// URL")
        if self.receivers < 1:
            raise ValueError(f"refit configuration: `receivers` is {self.receivers}, at least 1 is needed")
        if self.relay is not None and "://" not in self.relay:
            raise ValueError(f"refit configuration: relay {self.relay!r} is not of the form tcp://HOST:PORT")
        if self.application not in APPLICATIONS:
            raise ValueError(f"refit configuration: application {self.application!r} is none of {APPLICATIONS}")
        for name in ("chunk_bytes", "bucket_bytes", "bucket_queue"):
            if getattr(self, name) < 1:
                raise ValueError(f"refit configuration: `{name}` is {getattr(self, name)}, not above 0")
        if self.threads < 0:
            raise ValueError(f"refit configuration: `threads` is {self.threads}, below 0")
        if self.window_bytes is not None and self.window_bytes < 1:
            raise ValueError(f"refit configuration: `window_bytes` is {self.window_bytes}, not above 0")

    def _check_kinds(self) -> None:
        """Numbers are numbers: a configuration file may hold text in their place."""
        for name in ("receivers", "chunk_bytes", "bucket_bytes", "bucket_queue", "threads", "window_bytes"):
            value = getattr(self, name)
            if not (type(value) is int or (name == "window_bytes" and value is None)):
                raise ValueError(f"refit configuration: `{name}` is {value!r}, not a whole number")
        for name in ("connect_timeout_s", "peers_timeout_s", "timeout_s", "source_grace_s"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value <= LONGEST_S:
                raise ValueError(f"refit configuration: `{name}` is {value!r}, not above 0 and at most {LONGEST_S:g}")

    @classmethod
    def from_mapping(cls, section: Mapping[str, Any]) -> "RefitConfig":
        """From a section of a training configuration; unknown keys are refused by name."""
        known = {each.name for each in fields(cls)}
        unknown = sorted(set(section) - known)
        if unknown:
            names = ", ".join(f"`{name}`" for name in unknown)
            raise ValueError(f"refit configuration: {names} not known; known are {', '.join(sorted(known))}")
        if "record" not in section:
            raise ValueError("refit configuration: `record` is missing: the file of the commit record")
        return cls(**section)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> "RefitConfig":
        """From `DCR_RELAY`, `DCR_RECORD`, `DCR_GATES` (commas between URLs), `DCR_RECEIVERS`,
        `DCR_APPLICATION` and `DCR_TIMEOUT_S`. The first two are required."""
        for name, what in (("DCR_RELAY", "tcp://HOST:PORT"), ("DCR_RECORD", "the file of the commit record")):
            if not environ.get(name):
                raise ValueError(f"refit configuration: {name} is not set; set it to {what}")
        section: dict[str, Any] = {"relay": environ["DCR_RELAY"], "record": environ["DCR_RECORD"]}
        gates = environ.get("DCR_GATES", "")
        section["gates"] = [gate.strip() for gate in gates.split(",") if gate.strip()]
        for name, key, kind in (
            ("DCR_RECEIVERS", "receivers", int),
            ("DCR_APPLICATION", "application", str),
            ("DCR_TIMEOUT_S", "timeout_s", float),
        ):
            if value := environ.get(name):
                try:
                    section[key] = kind(value)
                except ValueError:
                    raise ValueError(f"refit configuration: {name}={value!r} is not a number") from None
        return cls(**section)
