"""The one error of everything that a user gives: keys, files, folders, commands. Imports nothing."""


class RunError(Exception):
    """Bad usage or a bad run file: one message for the user, exit status 2, before any process starts."""
