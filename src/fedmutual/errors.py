"""What a user did that cannot be done, said in one sentence that names the file, the key or the client, and the mend."""


class UserError(Exception):
    """Bad input. The command line prints its one sentence and exits with 2; no traceback."""


class ConfigError(UserError):
    """A configuration that cannot be run as written."""


class DataError(UserError):
    """Data that cannot be learned from as they are."""


class RunError(UserError):
    """A run folder that is missing, foreign, damaged, used or cannot be written."""


class Busy(RunError):
    """A folder that another process writes."""


class AlgorithmError(UserError):
    """An algorithm of the user's own that raised something, or gave what cannot be used."""

    def __init__(self, sentence: str, trace: str = "") -> None:
        """trace: of what it raised, which log.txt holds."""
        super().__init__(sentence, trace)
        self.trace = trace

    def __str__(self) -> str:
        return str(self.args[0])


def format_error(problem: Exception) -> str:
    """The first line of an error that somebody else's code raised, with its kind."""
    return f"{type(problem).__name__}: {(str(problem).strip().splitlines() or ['no message'])[0]}"


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
