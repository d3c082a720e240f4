"""What a user did that cannot be done, said in one sentence that names the file, the key or the client, and the mend."""


class UserError(Exception):
    """Bad input. The command line prints its one sentence and exits with 2; no traceback."""


class ConfigError(UserError):
    """A configuration that cannot be run as written."""


class DataError(UserError):
    """Data that cannot be learned from as they are."""


class RunError(UserError):
    """A run folder that is missing, foreign, damaged, used or cannot be written."""
