"""The report of a committed refit."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class RefitReport:
    """What a refit changed, moved and took. The same on every training rank.

    Made from the coordinator's JSON; keys that are not known here stay readable in `raw`.
    """

    version: int
    """The committed policy version, 1 for the first."""
    baseline: str
    """The committed candidate baseline identifier, in hex."""
    attempt: str
    """The attempt that was committed, in hex."""
    mode: str
    """"mixed", "overwrite" or "dense"."""
    application: str
    """"asynchronous" or "synchronous"."""
    receivers: list[str]
    """The rollout ranks that hold the version."""
    tensors: int
    """Canonical tensors of the model."""
    elements: int
    """Elements compared: all elements of the model."""
    changed: int
    """Elements whose stored bits differ from the previous version."""
    checkpoint_bytes: int
    """Bytes of all canonical tensors."""
    payloads: int
    """Payloads sent by all owners."""
    payload_bytes: int
    """Their compressed bytes."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds from the start of the refit to the end of each stage, in the order in which they ended."""
    raw: dict[str, Any] = field(default_factory=dict, repr=False)
    """The coordinator's report as it came."""

    @property
    def seconds(self) -> float:
        """The whole refit: until the request gate was open again."""
        return max(self.stages.values(), default=0.0)

    @property
    def changed_share(self) -> float:
        """Changed elements as a share of all elements."""
        return self.changed / self.elements if self.elements else 0.0

    @property
    def payload_share(self) -> float:
        """Payload bytes as a share of the checkpoint's bytes."""
        return self.payload_bytes / self.checkpoint_bytes if self.checkpoint_bytes else 0.0

    @property
    def stage_seconds(self) -> dict[str, float]:
        """Seconds of each stage by itself; their sum is `seconds`."""
        result, before = {}, 0.0
        for name, end in self.stages.items():
            result[name] = end - before
            before = end
        return result

    @classmethod
    def from_json(cls, text: str) -> "RefitReport":
        """From the coordinator's report; `ValueError` when it is not one."""
        try:
            raw = json.loads(text)
            committed, totals = raw["committed"], raw["totals"]
            return cls(
                version=int(committed["version"]),
                baseline=str(committed["baseline"]),
                attempt=str(raw["attempt"]),
                mode=str(raw["mode"]),
                application=str(raw.get("application", "")),
                receivers=[str(name) for name in raw.get("receivers", [])],
                tensors=int(raw.get("tensors", 0)),
                elements=int(totals["elements"]),
                changed=int(totals["changed"]),
                checkpoint_bytes=int(totals["bytes"]),
                payloads=int(totals["payloads"]),
                payload_bytes=int(totals["payload_bytes"]),
                stages=_in_order(raw.get("stages", {})),
                raw=raw,
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            shown = text if len(text) <= 200 else f"{text[:200]}..."
            raise ValueError(f"not a report of a refit ({type(error).__name__}: {error}): {shown}") from error

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with what is derived as well."""
        result = asdict(self)
        for name in ("seconds", "changed_share", "payload_share", "stage_seconds"):
            result[name] = getattr(self, name)
        return result


def _in_order(stages: Mapping[str, Any]) -> dict[str, float]:
    # A stage that a refit does not have ends at 0.
    ends = {str(name): float(end) for name, end in stages.items() if end}
    return dict(sorted(ends.items(), key=lambda each: each[1]))
