"""A Megatron Bridge trainer on the CPU: two ranks on gloo, TP=2, driven step by step.

    python -m testbed.trainer CHECKPOINT

starts the ranks and keeps watch over them. Commands come as JSON lines on standard input, answers go as JSON
lines to the file descriptor `--answers` (1 by default; libraries also print there):

    {"do": "step"}                        one optimizer step on the next batch
    {"do": "refit", "mode": "auto"}       refit the rollout servers; the answer has the report
    {"do": "export", "dir": "/some/dir"}  write the model as a Hugging Face checkpoint
    {"do": "quit"}                        end; so does the end of standard input

The first answer says that the trainer is ready. With `DCR_RELAY` set, it has then taken its baseline and is
registered at the relay. An answer has "ok": false and "error" when a command failed.
"""

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from testbed.processes import dies_with_parent

RANK = "RANK"
"""Set in the ranks, not in the program that watches over them."""
BATCH, SEQUENCE = 4, 64
IDLE_S = 6 * 3600.0
"""How long ranks wait for each other, that is, for the next command."""
PR_SET_NAME = 15


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a tiny model, step by step, and refit rollout servers.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tp", type=int, default=2, help="ranks, all of them tensor-parallel")
    parser.add_argument("--lr", type=float, default=2e-6)
    parser.add_argument("--seed", type=int, default=0, help="of the training data")
    parser.add_argument("--answers", type=int, default=1, help="file descriptor for the answers")
    arguments = parser.parse_args()
    if RANK in os.environ:
        return run_rank(arguments)
    if not (arguments.checkpoint / "config.json").is_file():
        raise SystemExit(f"trainer: {arguments.checkpoint} is not a Hugging Face checkpoint (no config.json)")
    return watch(arguments.tp, arguments.answers)


# The watching process.


def watch(ranks: int, answers: int) -> int:
    """Start the ranks; when one ends, or this process is told to, end all. Returns the first bad status."""
    environment = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        # Everything stays on the loopback interface, whatever the host is called.
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-m", "testbed.trainer", *sys.argv[1:]]
    processes: list[subprocess.Popen] = []

    def stop(*_: object) -> None:
        for process in processes:
            if process.poll() is None:
                process.terminate()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    for rank in range(ranks):
        first = rank == 0
        process = subprocess.Popen(
            command,
            env={**environment, RANK: str(rank)},
            stdin=None if first else subprocess.DEVNULL,
            pass_fds=[answers] if first else [],
            # Also when this process is killed, nothing is left behind.
            preexec_fn=dies_with_parent(),  # noqa: PLW1509
        )
        processes.append(process)
    while True:
        states = [process.poll() for process in processes]
        if any(state is not None for state in states):
            break
        time.sleep(0.1)
    bad = next((rank for rank, state in enumerate(states) if state), None)
    if bad is not None:
        print(f"trainer: rank {bad} ended with status {states[bad]}; ending the others", file=sys.stderr)
    _end(processes, patience_s=30.0 if bad is None else 5.0)
    return next((abs(process.returncode) for process in processes if process.returncode), 0)


def _end(processes: list[subprocess.Popen], patience_s: float) -> None:
    """A rank that ends well is followed by the others; one that ended badly left them in a collective."""
    for how in (None, subprocess.Popen.terminate, subprocess.Popen.kill):
        for process in processes:
            if how is not None and process.poll() is None:
                how(process)
        deadline = time.monotonic() + patience_s
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# A rank.


def run_rank(arguments: argparse.Namespace) -> int:
    """One training rank: rank 0 reads the commands and answers them, all ranks carry them out."""
    rank = int(os.environ[RANK])
    ctypes.CDLL(None).prctl(PR_SET_NAME, b"dcr-rank-%d" % rank)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the watching process decides
    answers = os.fdopen(arguments.answers, "w", closefd=False) if rank == 0 else None

    def answer(**content: Any) -> None:
        if answers is not None:
            answers.write(json.dumps(content) + "\n")
            answers.flush()

    try:
        training = _Training(arguments)
        answer(ok=True, do="start", **training.describe())
        for command in training.commands():
            if command.get("do") == "quit":
                break
            began = time.monotonic()
            try:
                result = training.perform(command)
            except training.recoverable as error:
                answer(ok=False, do=command.get("do"), error=str(error))
            else:
                answer(ok=True, do=command["do"], seconds=time.monotonic() - began, **result)
        training.close()
    except Exception as error:
        told = (str(error).strip().splitlines() or [""])[0]
        answer(ok=False, do="end", error=f"rank {rank}: {type(error).__name__}: {told}")
        raise
    return 0


class _Training:
    """Model, optimizer, data and refit client of one rank."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.client = None
        self.recoverable: tuple[type[Exception], ...] = (CommandError,)
        config = self._refit_config()
        # Imported here, so that the watching process stays small.
        from testbed.megatron_cpu import model as megatron

        self.checkpoint: Path = arguments.checkpoint
        self.seed: int = arguments.seed
        self.steps = 0
        megatron.initialize(arguments.tp, patience_s=IDLE_S)
        self.bridge, self.model = megatron.build(self.checkpoint)
        self.optimizer = megatron.make_optimizer(self.model, arguments.lr)
        self.vocabulary = json.loads((self.checkpoint / "config.json").read_text())["vocab_size"]
        if config is not None:
            self._connect(config)

    def _refit_config(self) -> Any:
        """Read before the model is built, so that a mistake in it is told at once."""
        if not os.environ.get("DCR_RELAY"):
            return None
        from dcr_training import RefitConfig

        return RefitConfig.from_environment()

    def _connect(self, config: Any) -> None:
        from dcr_training import MegatronBridgeSource, RefitClient, RefitError

        self.client = RefitClient(MegatronBridgeSource(self.bridge, self.model), config)
        self.client.initialize()
        self.recoverable += (RefitError,)

    def describe(self) -> dict[str, Any]:
        """For the first answer."""
        import torch.distributed as dist

        return {"ranks": dist.get_world_size(), "pid": os.getpid(), "refits": self.client is not None}

    def commands(self) -> Iterator[dict[str, Any]]:
        """Commands as rank 0 reads them, on every rank."""
        import torch.distributed as dist

        while True:
            command: list[Any] = [None]
            if dist.get_rank() == 0:
                line = sys.stdin.readline()
                command = [_parse(line) if line else {"do": "quit"}]
            dist.broadcast_object_list(command, src=0)
            yield command[0]

    def perform(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry out one command; what it returns is added to the answer."""
        actions: dict[Any, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "step": self._step,
            "refit": self._refit,
            "export": self._export,
        }
        if command.get("do") not in actions:
            raise CommandError(command.get("error") or f"no such command: {json.dumps(command)}")
        return actions[command["do"]](command)

    def _step(self, _: dict[str, Any]) -> dict[str, Any]:
        from testbed.megatron_cpu import model as megatron

        batch = megatron.random_batch(self.vocabulary, BATCH, SEQUENCE, f"{self.seed}/{self.steps}")
        loss, grad_norm, updated = megatron.train_step(self.model, self.optimizer, batch)
        self.steps += 1
        return {"step": self.steps, "loss": loss, "grad_norm": grad_norm, "updated": updated}

    def _refit(self, command: dict[str, Any]) -> dict[str, Any]:
        if self.client is None:
            raise CommandError("this trainer has no relay: start it with DCR_RELAY and DCR_RECORD set")
        return {"report": self.client.refit(command.get("mode", "auto")).as_dict()}

    def _export(self, command: dict[str, Any]) -> dict[str, Any]:
        if not command.get("dir"):
            raise CommandError("export needs a directory: {'do': 'export', 'dir': ...}")
        tensors = {
            name: tensor.contiguous()
            for name, tensor in self.bridge.export_hf_weights(self.model, cpu=True, show_progress=False)
        }
        import torch.distributed as dist

        if dist.get_rank() == 0:
            write_checkpoint(Path(command["dir"]), tensors, self.checkpoint)
        return {"dir": command["dir"], "tensors": len(tensors), "step": self.steps}

    def close(self) -> None:
        """Leave the relay and the process group."""
        import torch.distributed as dist

        if self.client is not None:
            self.client.close()
        dist.destroy_process_group()


class CommandError(Exception):
    """A command that can't be carried out; the trainer goes on."""


def _parse(line: str) -> dict[str, Any]:
    try:
        command = json.loads(line)
        if isinstance(command, dict):
            return command
    except ValueError:
        pass
    return {"error": f"not a JSON object: {line.strip()[:200]}"}


def write_checkpoint(directory: Path, tensors: dict[str, Any], like: Path) -> None:
    """Write `tensors` with the configuration and tokenizer of the checkpoint `like`, whole or not at all."""
    from safetensors.torch import save_file

    unfinished = directory.with_name(f".{directory.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for file in like.iterdir():
        if file.suffix not in (".safetensors", ".bin") and not file.name.endswith(".index.json"):
            shutil.copy(file, unfinished)
    save_file(tensors, unfinished / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(directory, ignore_errors=True)
    unfinished.rename(directory)


if __name__ == "__main__":
    sys.exit(main())
