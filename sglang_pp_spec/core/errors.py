"""Every way this project says no."""


class PPSpecError(RuntimeError):
    """Base of the run-time faults: the engine must not go on past one of these."""


class FrameRefused(PPSpecError):
    """A received frame is not the one this stage waits for; nothing of it was applied."""


class FenceViolation(PPSpecError):
    """A request was launched while an output-dependent frame of it was still in flight."""


class LedgerFault(PPSpecError):
    """The ledger's own bookkeeping does not add up."""


class UnsupportedCombination(ValueError):
    """The server arguments ask for something this plugin refuses; the message gives reason and fix."""
