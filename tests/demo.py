#!/usr/bin/env python3
"""`make demo`: five optimizer steps, each with a refit into a running vLLM server, compared bit for bit.

Real parts only: Megatron Bridge trains on gloo with tensor parallelism 2, vLLM serves with dcr's plugin, and the
payloads travel over ZeroMQ through a relay. Exit status 0 only if every parameter and buffer of every vLLM rank had
the same bits as a dense load of the trainer's exported weights after every refit.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

from environments.problems import SetupProblem
from environments.setup_environments import set_up
from testbed.processes import ProcessError
from testbed.run import Run
from testbed.serve import ServerError
from testbed.table import Table
from testbed.train import TrainerError

STEPS = 5
PROMPT = "baba babe babi babo"
COLUMNS = {
    "step": 4,
    "mode": 5,
    "changed": 7,
    "share": 6,
    "payload": 9,
    "of ckpt": 7,
    "prepare": 7,
    "stream": 7,
    "gate": 7,
    "apply": 7,
    "commit": 7,
    "total s": 7,
    "bit-exact": 9,
}


def main() -> int:
    """Runs the demo; returns the exit status."""
    tp = os.environ.get("DEMO_TP", "1")
    if tp not in ("1", "2"):
        print(f"demo: DEMO_TP={tp} is not 1 or 2", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(os.environ.get("DEMO_OUT", "demo-out")).absolute() / f"tp{tp}"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        return demo(Run(set_up(), folder, tp=int(tp), tell=tell), tell)
    except (SetupProblem, ProcessError, ServerError, TrainerError) as problem:
        print(f"demo: {problem}", file=sys.stderr)
        print(f"demo: logs are in {folder / 'logs'}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted; every process has been stopped", file=sys.stderr)
        return 130


def demo(run: Run, tell) -> int:
    """The run itself: a dense refit, then steps and delta refits, each verified."""
    table = Table(COLUMNS)
    exact = True
    with run:
        tell("a dense refit brings every receiver to the trainer's weights; then one delta refit a step")
        table.header()
        for step in range(STEPS + 1):
            if step:
                run.trainer.step()
            report = run.trainer.refit()
            text = run.server.completion(PROMPT)
            exported = run.trainer.export(run.folder / "exports" / f"step-{step}")
            ranks = run.server.verify(exported)
            differences = [line for rank in ranks for line in describe(rank)]
            exact = exact and not differences
            table.row(row(step, report, "no" if differences else "yes"))
            for line in differences:
                print(f"    {line}")
            print(f"    completion: {text.strip()!r}")
        checked = sum(rank["tensors"] for rank in ranks)
        tell(f"compared {checked} parameters and buffers on {len(ranks)} vLLM ranks after each refit")
    print(f"demo: {'every refit was bit-exact' if exact else 'NOT bit-exact'}; logs and exports are in {run.folder}")
    return 0 if exact else 1


def describe(rank: dict) -> list[str]:
    """What differs on one vLLM rank, in lines; nothing when it is bit-exact."""
    if rank.get("error"):
        return [f"rank {rank.get('rank')}: the comparison failed: {rank['error']}"]
    return [f"rank {rank['rank']}: {name} differs from a dense load" for name in rank["differing"]]


def row(step: int, report: dict, verdict: str) -> tuple[str, ...]:
    """One line of the table from a refit's report."""
    return (
        str(step),
        report["mode"],
        f"{report['changed']:,}",
        f"{report['changed_share']:.2%}",
        f"{report['payload_bytes']:,} B",
        f"{report['payload_share']:.2%}",
        *(f"{seconds:.3f}" for seconds in stages(report)),
        f"{report['seconds']:.3f}",
        verdict,
    )


def stages(report: dict) -> tuple[float, float, float, float, float]:
    """Seconds for prepare, stream (compare, encode, send, stage), closing the gate, apply, and commit.

    With asynchronous application they follow one another. With synchronous application (a dense refit) the gate
    closes and payloads are applied while owners still stream; apply is then what is left after the last was sent.
    """
    end = report["stages"]
    streamed = end.get("staged", end["streamed"])
    return (
        end["owners_prepared"],
        streamed - end["owners_prepared"],
        end["gate_closed"] - end["gate_closing"],
        end["flushed"] - max(streamed, end["gate_closed"]),
        end["gate_opened"] - end["flushed"],
    )


STARTED = time.monotonic()


def tell(line: str) -> None:
    """One line of progress with the seconds since the start."""
    print(f"demo: [{time.monotonic() - STARTED:5.1f} s] {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
