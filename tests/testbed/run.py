"""A whole run of real parts on one machine: relay, vLLM server and Megatron trainer, each in its environment."""

import secrets
import subprocess
from collections.abc import Callable
from pathlib import Path

from environments.places import Places

from testbed import processes
from testbed.serve import VllmServer
from testbed.train import Trainer


class Run:
    """Starts everything in order and ends it in reverse order; a context manager.

    `folder` receives the checkpoint, keys, logs and the commit record. `tell` is told each step in one line.
    """

    def __init__(
        self,
        places: Places,
        folder: Path,
        *,
        tp: int = 1,
        learning_rate: float | None = None,
        application: str = "asynchronous",
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.places = places
        self.folder = folder
        self.tp = tp
        self.learning_rate = learning_rate
        self.application = application
        self.tell = tell
        self.checkpoint = folder / "checkpoint"
        self.relay: subprocess.Popen | None = None
        self.relay_address = ""
        self.server: VllmServer | None = None
        self.trainer: Trainer | None = None

    def __enter__(self) -> "Run":
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends all processes, in the reverse of the order in which they were started."""
        trainer, server, relay = self.trainer, self.server, self.relay
        self.trainer = self.server = self.relay = None
        try:
            if trainer is not None:
                # While it still starts it cannot hear a polite word.
                trainer.stop(patience_s=5.0)
        finally:
            try:
                if server is not None:
                    server.stop()
            finally:
                processes.stop(relay)

    def log(self, name: str) -> Path:
        """The log of a part: relay, server or trainer."""
        return self.folder / "logs" / f"{name}.log"

    def environment(self, name: str) -> dict[str, str]:
        """Variables of a process of this run in an environment."""
        variables = self.places.variables(name)
        variables["DCR_RUN_KEY_FILE"] = str(self.folder / "run.key")
        if self.relay_address:
            variables["DCR_RELAY"] = self.relay_address
        return variables

    def _start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.tell("making a tiny random Qwen3-MoE checkpoint and its tokenizer")
        self._make_checkpoint()
        self._write_key()
        self.tell("starting dcr relay")
        self._start_relay()
        self.tell(
            f"starting a vLLM server (tensor parallel {self.tp}) and a Megatron Bridge trainer (tensor parallel 2)"
        )
        self._start_server_and_trainer()

    def _make_checkpoint(self) -> None:
        command = [self.places.python("rollout"), "-m", "testbed.checkpoint", self.checkpoint]
        process = processes.start(command, self.environment("rollout"), self.log("checkpoint"))
        if process.wait(timeout=300) != 0:
            raise processes.ProcessError(f"the checkpoint could not be made: {processes.tail(self.log('checkpoint'))}")

    def _write_key(self) -> None:
        key = self.folder / "run.key"
        key.touch(mode=0o600)
        key.write_text(secrets.token_hex(32) + "\n", encoding="utf-8")

    def _start_relay(self) -> None:
        address_file = self.folder / "relay.address"
        address_file.unlink(missing_ok=True)
        program = self.places.dcr / "bin" / "dcr"
        command = [program, "relay", "--listen", "tcp://127.0.0.1:0", "--address-file", address_file]
        self.relay = processes.start(command, self.environment("tools"), self.log("relay"))
        self.relay_address = processes.wait_for_file(address_file, self.relay, self.log("relay"), 30)

    def _start_server_and_trainer(self) -> None:
        self.server = VllmServer(
            self.checkpoint,
            tp=self.tp,
            environment=self.environment("rollout"),
            log=self.log("server"),
            python=self.places.python("rollout"),
        )
        self.server.start()
        environment = self.environment("training")
        environment.update(
            DCR_RECORD=str(self.folder / "commit-record.json"),
            DCR_GATES=self.server.url,
            DCR_RECEIVERS=str(self.tp),
            DCR_APPLICATION=self.application,
        )
        self.trainer = Trainer.launch(
            self.checkpoint,
            environment,
            self.log("trainer"),
            python=self.places.python("training"),
            lr=self.learning_rate,
        )
        # Both start at the same time; the server takes longer.
        self.server.wait_ready(600.0)
        self.trainer.wait_ready(600.0)
