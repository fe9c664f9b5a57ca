"""What a refit raises on the training side."""


class RefitError(RuntimeError):
    """A refit, or its preparation, failed. Every training rank raises the same error.

    The message is one line: what happened, at which rank and tensor, and what that means for the weights.
    """

    def __init__(
        self,
        reason: str,
        *,
        rank: int | None = None,
        tensor: str | None = None,
        weights: str = "untouched",
        fatal: bool = False,
    ) -> None:
        super().__init__(reason)
        self.rank = rank
        """The training rank that failed first, where one of them did."""
        self.tensor = tensor
        """The canonical tensor that it was about, if any."""
        self.weights = weights
        """What receivers hold now: "untouched" (the committed version), "unusable" (until a dense refit) or
        "committed" (the new version; only what follows the commit failed)."""
        self.fatal = fatal
        """Training ranks have lost step with each other: their process groups are of no use, end the job."""
